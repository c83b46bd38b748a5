// SPDX-License-Identifier: GPL-2.0
/*
 * `stillpoint patch --view generation` on a program with quiescence points (points.c of the patch tests), which itself checks the
 * promises of a mode to threads between two of them.
 */
#define _GNU_SOURCE
#include "../../tests/programs/control.h"

#include <signal.h>
#include <sys/wait.h>

#include "harness.h"
#include "tool.h"

#define PAGE "/control-points"
#define ROUNDS 4

static pid_t program;
static uint32_t epoch;

static void announce(int from, int to, int flags)
{
	atomic_store(&control->phase, (uint64_t)++epoch << 32 | (uint64_t)flags << 16 | (uint64_t)to << 8 | (uint64_t)from);
}

static void start_points(const char *promise)
{
	int file = open(PAGE, O_RDWR | O_CREAT | O_TRUNC, 0600), null = open("/dev/null", O_RDWR);

	CHECK(file >= 0 && ftruncate(file, sizeof(*control)) == 0);
	close(file);
	control_open(PAGE);
	epoch = 0;
	announce(1, 1, 0);
	program = start((char *[]){"/points", PAGE, (char *)promise, "6", NULL}, null, 1);
	close(null);
	snprintf(pid, sizeof(pid), "%d", program);
	AWAIT(atomic_load(&control->ready));
}

/* Threads whose role is to sleep do not answer. */
static bool answers(const struct slot *slot)
{
	return slot->role[0] && strcmp(slot->role, "sleeper") && strcmp(slot->role, "blocked");
}

static void check_violations(void)
{
	if (atomic_load(&control->violations))
		printf("# points: %s\n", control->message);
	CHECK(!atomic_load(&control->violations));
	CHECK(waitpid(program, NULL, WNOHANG) == 0);
}

/* Waits until each thread has called the patched function twice; returns true if that version answered all of them. */
static bool all_answered(int version)
{
	bool all = true;

	for (uint32_t i = 0; i < atomic_load(&control->slots_used) && i < SLOTS; i++) {
		const struct slot *slot = &control->slots[i];
		uint64_t before = atomic_load(&slot->calls);

		if (!answers(slot))
			continue;
		AWAIT(atomic_load(&slot->calls) >= before + 2);
		all &= atomic_load(&slot->version) == (uint32_t)version;
	}
	check_violations();
	return all;
}

static void settled(int version)
{
	announce(version, version, 0);
	CHECK(all_answered(version));
}

#define WITH(verb, mode, ...) \
	tool(verb, "--view", "generation", "--quiescence", mode, "--timeout", "120s", ##__VA_ARGS__, NULL)

static void there_and_back(const char *mode, const char *promise)
{
	start_points(promise);
	for (int round = 0; round < ROUNDS; round++) {
		announce(1, 2, 0);
		ENDS(DONE, WITH("apply", (char *)mode, "/points.patch"));
		settled(2);
		announce(2, 1, 0);
		ENDS(DONE, WITH("revert", (char *)mode));
		settled(1);
	}
	ENDS(DONE, tool("status", NULL));
}

static void points_probed(void)
{
	there_and_back("probe", "none");
}

static void points_local(void)
{
	there_and_back("local", "alone");
}

static void points_group(void)
{
	there_and_back("group:a", "group");
}

static void points_global(void)
{
	there_and_back("global", "all");
}

/*
 * The tool is killed in each mode, between any two of its writes into the program: the next one completes the operation, and the modes
 * keep their promises.
 */
static void points_killed(void)
{
	static const char *const modes[] = {"local", "group:a", "global"};
	int tries = 0, killed = 0;

	start_points("none");
	for (size_t i = 0; i < sizeof(modes) / sizeof(*modes); i++) {
		char *mode = (char *)modes[i];
		char *words[] = {"/stillpoint", "patch", "apply", "--pid", pid, "--view", "generation", "--quiescence", mode,
				 "--timeout", "60s", "/points.patch", NULL};
		bool all = false;

		for (unsigned long n = 1; !all; n++) {
			announce(1, 2, FREE);
			all = killed_at(n, words, &killed) < n;
			all_answered(1);
			/* a tool of either mechanism may find the state; only this one may end a generation with threads in it */
			bool other = n % 2;
			int code = tool("apply", "--view", other ? "trampoline" : "generation", "--timeout", "120s", "/points.patch",
					NULL);

			if (code == REFUSED) {
				CHECK(other && strstr(said, "--view generation"));
				ENDS(DONE, WITH("apply", mode, "/points.patch"));
			} else {
				wanted(code, DONE, __LINE__);
			}
			settled(2);
			announce(2, 1, FREE);
			ENDS(DONE, WITH("revert", mode));
			settled(1);
			tries++;
		}
		printf("# %s: %d of %d killed by now\n", mode, killed, tries);
	}
	CHECK(killed > tries / 2);
}

const struct test points_tests[] = {
	{"points_probed", points_probed, 600},
	{"points_local", points_local, 600},
	{"points_group", points_group, 600},
	{"points_global", points_global, 600},
	{"points_killed", points_killed, 2400},
	{}
};
