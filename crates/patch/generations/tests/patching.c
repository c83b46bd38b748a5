// SPDX-License-Identifier: GPL-2.0
/* `stillpoint patch --view generation` on a program of several threads (../patching/victim.c). */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "tool.h"

#define THREADS 6

static FILE *commands, *answers;

static void start_victim_with(char *word)
{
	int to[2], from[2];

	CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
	snprintf(pid, sizeof(pid), "%d", start((char *[]){"/victim", word, NULL}, to[0], from[1]));
	commands = fdopen(to[1], "w");
	answers = fdopen(from[0], "r");
	close(to[0]);
	close(from[1]);
	setvbuf(commands, NULL, _IOLBF, 0);
}

static void start_victim(void)
{
	start_victim_with(NULL);
}

static const char *ask(const char *command)
{
	static char line[128];

	fprintf(commands, "%s\n", command);
	CHECK(fgets(line, sizeof(line), answers));
	return line;
}

static void expect_at(int old, int new, int line)
{
	char wanted[128];
	const char *seen = ask("look");

	snprintf(wanted, sizeof(wanted), "old %d new %d wrong 0\n", old, new);
	if (strcmp(seen, wanted)) {
		printf("# line %d: seen: %s", line, seen);
		CHECK(!"threads see what they should");
	}
}

#define expect(old, new) expect_at(old, new, __LINE__)

#define APPLY(view, ...) tool("apply", "--view", view, ##__VA_ARGS__, "/fix.patch", NULL)
#define REVERT(view, ...) tool("revert", "--view", view, ##__VA_ARGS__, NULL)

/* Returns true if there is a generation with at least that many threads. */
static bool has_generations(int least)
{
	char path[64], line[128];
	bool found = false;
	int threads;

	snprintf(path, sizeof(path), "/proc/%s/generations", pid);
	FILE *list = fopen(path, "r");

	CHECK(list);
	while (fgets(line, sizeof(line), list))
		found |= sscanf(line, "%*d known %d", &threads) == 1 && threads >= least;
	fclose(list);
	return found;
}

/* Applies and reverts, by generations and by trampolines in turns. */
static void patch_by_generation(void)
{
	start_victim();
	expect(THREADS, 0);
	ENDS(DONE, tool("check", "--view", "generation", "/fix.patch", NULL));
	ENDS(DONE, APPLY("generation"));
	expect(0, THREADS);
	CHECK(!has_generations(0));
	ENDS(DONE, APPLY("generation"));
	CHECK(strstr(said, "already"));
	ENDS(DONE, tool("status", NULL));
	CHECK(strstr(said, "2 of 2 verified") || strstr(said, "3 of 3 verified"));
	ENDS(DONE, REVERT("generation"));
	expect(THREADS, 0);
	ENDS(DONE, APPLY("trampoline"));
	expect(0, THREADS);
	ENDS(DONE, REVERT("generation"));
	expect(THREADS, 0);
	ENDS(DONE, APPLY("generation"));
	ENDS(DONE, REVERT("trampoline"));
	expect(THREADS, 0);
	ENDS(REFUSED, APPLY("generation", "--quiescence", "stop"));
}

/* Impossible for trampolines: a constant changes at its address, and no thread sees it change during its use. */
static void patch_constant(void)
{
	start_victim();
	expect(THREADS, 0);
	ENDS(REFUSED, tool("apply", "/constant.patch", NULL));
	CHECK(strstr(said, "--view generation"));
	for (int round = 0; round < 3; round++) {
		ENDS(DONE, tool("apply", "--view", "generation", "/constant.patch", NULL));
		expect(0, THREADS);
		ENDS(DONE, tool("status", NULL));
		ENDS(REFUSED, REVERT("trampoline"));
		CHECK(strstr(said, "--view generation"));
		CHECK(!strcmp(ask("hold"), "held\n"));
		ENDS(FELL_BACK, REVERT("generation", "--timeout", "3s"));
		CHECK(strstr(said, "slow_answer"));
		expect(0, THREADS);
		CHECK(!strcmp(ask("release"), "released\n"));
		/* a patch of a function above it, by either mechanism */
		ENDS(DONE, APPLY(round % 2 ? "generation" : "trampoline"));
		expect(0, THREADS);
		ENDS(DONE, REVERT("trampoline"));
		expect(0, THREADS);
		ENDS(DONE, REVERT("generation"));
		expect(THREADS, 0);
	}
}

/* While a thread stays in the changed function, the others migrate and return. */
static void patch_held(void)
{
	start_victim();
	expect(THREADS, 0);
	CHECK(!strcmp(ask("hold"), "held\n"));
	ENDS(FELL_BACK, APPLY("generation", "--timeout", "3s"));
	CHECK(strstr(said, "slow_answer"));
	CHECK(!has_generations(0));
	expect(THREADS, 0);
	CHECK(!strcmp(ask("release"), "released\n"));
	ENDS(DONE, APPLY("generation"));
	expect(0, THREADS);
}

/* A coroutine of the program's own, suspended in a changed function, is found before anything is touched. */
static void patch_suspended(void)
{
	start_victim();
	expect(THREADS, 0);
	CHECK(!strcmp(ask("suspend"), "suspended\n"));
	ENDS(REFUSED, APPLY("generation", "--timeout", "3s"));
	CHECK(strstr(said, "suspended_answer, on a suspended stack"));
	CHECK(!has_generations(0));
	expect(THREADS, 0);
	CHECK(!strcmp(ask("resume"), "resumed\n"));
	ENDS(DONE, APPLY("generation"));
	expect(0, THREADS);
	ENDS(DONE, REVERT("generation"));
	/* with the option it is a warning */
	start_victim();
	expect(THREADS, 0);
	CHECK(!strcmp(ask("suspend"), "suspended\n"));
	ENDS(DONE, APPLY("generation", "--allow-suspended-frames"));
	CHECK(strstr(said, "suspended_answer"));
	expect(0, THREADS);
}

/* Functions that are shorter than a jump, with no space after them, are overwritten. */
static void patch_code(void)
{
	start_victim();
	expect(THREADS, 0);
	ENDS(REFUSED, tool("apply", "/code.patch", NULL));
	CHECK(strstr(said, "--view generation"));
	for (int round = 0; round < 3; round++) {
		ENDS(DONE, tool("apply", "--view", "generation", "/code.patch", NULL));
		expect(0, THREADS);
		ENDS(DONE, tool("status", NULL));
		ENDS(REFUSED, REVERT("trampoline"));
		/* no thread is in the changed function, although one is held elsewhere */
		CHECK(!strcmp(ask("hold"), "held\n"));
		ENDS(DONE, REVERT("generation"));
		CHECK(!strcmp(ask("release"), "released\n"));
		expect(THREADS, 0);
	}
}

static bool stays(void)
{
	ENDS(DONE, tool("status", NULL));
	return strstr(said, "may stay in slow_answer");
}

#define APPLY_STAYING(...) tool("apply", "--view", "generation", "--timeout", "60s", ##__VA_ARGS__, "/staying.patch", NULL)

/* A thread that never leaves the changed function keeps the old version, all others migrate; it follows when it has left. */
static void staying(char *mode)
{
	expect(THREADS, 0);
	ENDS(REFUSED, tool("apply", "/staying.patch", NULL));
	CHECK(strstr(said, "slow_answer") && strstr(said, "--view generation"));
	for (int round = 0; round < 2; round++) {
		CHECK(!strcmp(ask("hold"), "held\n"));
		ENDS(DONE, APPLY_STAYING("--quiescence", mode));
		expect(1, THREADS - 1);
		CHECK(stays() && has_generations(THREADS - 1));
		ENDS(DONE, APPLY_STAYING("--quiescence", mode));
		expect(1, THREADS - 1);
		/* no other operation begins meanwhile */
		ENDS(REFUSED, tool("apply", "--view", "generation", "/constant.patch", NULL));
		CHECK(strstr(said, "slow_answer"));
		ENDS(REFUSED, REVERT("trampoline"));
		ENDS(DONE, REVERT("generation", "--quiescence", mode));
		expect(THREADS, 0);
		CHECK(!stays() && !has_generations(0));
		ENDS(DONE, APPLY_STAYING("--quiescence", mode));
		CHECK(!strcmp(ask("release"), "released\n"));
		/* it stays in its version until the next call of the tool migrates it */
		expect(1, THREADS - 1);
		ENDS(DONE, APPLY_STAYING("--quiescence", mode));
		expect(0, THREADS);
		CHECK(!stays() && !has_generations(0));
		/* a revert may leave a thread behind, too */
		CHECK(!strcmp(ask("hold"), "held\n"));
		ENDS(DONE, REVERT("generation", "--quiescence", mode));
		expect(THREADS - 1, 1);
		CHECK(stays());
		CHECK(!strcmp(ask("release"), "released\n"));
		ENDS(DONE, REVERT("generation", "--quiescence", mode));
		expect(THREADS, 0);
		CHECK(!stays());
	}
}

static void patch_staying(void)
{
	start_victim();
	staying("probe");
}

/* The thread has quiescence points, and reaches none of them. */
static void patch_staying_local(void)
{
	start_victim_with("points");
	staying("local");
}

/* Returns true if an io_uring worker, which runs none of the program's code, works for the process. */
static bool has_worker(void)
{
	char path[300], name[32] = "";
	bool found = false;
	struct dirent *entry;

	snprintf(path, sizeof(path), "/proc/%s/task", pid);
	DIR *threads = opendir(path);

	CHECK(threads);
	while (!found && (entry = readdir(threads))) {
		snprintf(path, sizeof(path), "/proc/%s/task/%s/comm", pid, entry->d_name);
		int comm = open(path, O_RDONLY);

		if (comm >= 0 && read(comm, name, sizeof(name) - 1) > 0)
			found = !strncmp(name, "iou-wrk-", 8);
		if (comm >= 0)
			close(comm);
	}
	closedir(threads);
	return found;
}

/* io_uring's workers stay in the base, also those that begin while their creator is elsewhere, and no operation waits for them. */
static void patch_workers(void)
{
	start_victim();
	expect(THREADS, 0);
	CHECK(!strcmp(ask("ring"), "read\n") && has_worker());
	for (int round = 0; round < 3; round++) {
		CHECK(!strcmp(ask("hold"), "held\n"));
		ENDS(FELL_BACK, APPLY("generation", "--timeout", "2s"));
		CHECK(strstr(said, "slow_answer") && !has_generations(0));
		expect(THREADS, 0);
		CHECK(!strcmp(ask("release"), "released\n"));
		ENDS(DONE, APPLY("generation"));
		expect(0, THREADS);
		ENDS(DONE, REVERT("generation"));
		expect(THREADS, 0);
		CHECK(has_worker());
	}
}

/* Direction and start of the operation in which the tool is killed. */
struct killing {
	bool back, hold, applied, released;
};

/* The same with a tool that is killed between any two of its writes into the program. */
static void staying_killed(char *mode, const struct killing *kinds, size_t kinds_count)
{
	char *over[] = {"/stillpoint", "patch", "apply", "--pid", pid, "--view", "generation", "--quiescence", mode,
			"/staying.patch", NULL};
	char *back[] = {"/stillpoint", "patch", "revert", "--pid", pid, "--view", "generation", "--quiescence", mode, NULL};
	int count = 0, tries = 0, old, new;

	expect(THREADS, 0);
	for (size_t i = 0; i < kinds_count; i++) {
		bool stays = kinds[i].hold && !kinds[i].released, all = false;

		for (unsigned long n = 1; !all; n++) {
			if (kinds[i].hold)
				CHECK(!strcmp(ask("hold"), "held\n"));
			if (kinds[i].applied)
				ENDS(DONE, APPLY_STAYING("--quiescence", mode));
			if (kinds[i].released)
				CHECK(!strcmp(ask("release"), "released\n"));
			all = killed_at(n, kinds[i].back ? back : over, &count) < n;
			CHECK(sscanf(ask("look"), "old %d new %d wrong 0", &old, &new) == 2 && old + new == THREADS);
			ENDS(DONE, APPLY_STAYING("--quiescence", mode));
			expect(stays, THREADS - stays);
			if (stays && n % 2)
				CHECK(!strcmp(ask("release"), "released\n"));
			ENDS(DONE, REVERT("generation", "--quiescence", mode, "--timeout", "60s"));
			if (stays && n % 2 == 0)
				CHECK(!strcmp(ask("release"), "released\n"));
			expect(THREADS, 0);
			CHECK(!has_generations(1));
			tries++;
		}
	}
	printf("# %d of %d killed\n", count, tries);
	CHECK(count > tries / 2);
}

static void patch_staying_killed(void)
{
	static const struct killing kinds[] = {
		{.back = false},
		{.back = false, .hold = true},
		/* from a state of rest, without a thread that stays */
		{.back = false, .hold = true, .applied = true, .released = true},
		{.back = true, .applied = true},
		{.back = true, .hold = true, .applied = true},
	};

	start_victim();
	staying_killed("probe", kinds, sizeof(kinds) / sizeof(*kinds));
}

static void patch_staying_local_killed(void)
{
	static const struct killing kinds[] = {
		{.back = false, .hold = true},
		{.back = false, .hold = true, .applied = true, .released = true},
	};

	start_victim_with("points");
	staying_killed("local", kinds, sizeof(kinds) / sizeof(*kinds));
}

#define KILLS 8

/* The tool is killed at any moment: each thread sees one version or the other, and the next call continues. */
static void patch_killed(void)
{
	int status;

	start_victim();
	expect(THREADS, 0);
	CHECK(!strcmp(ask("hold"), "held\n"));
	for (int i = 0; i < KILLS; i++) {
		char *words[] = {"/stillpoint", "patch", "apply", "--pid", pid, "--view", "generation",
				 "--timeout", "60s", "/fix.patch", NULL};
		int null = open("/dev/null", O_RDWR);
		pid_t child = start(words, null, null);

		close(null);
		/* all but one have migrated, and that one prevents the commit */
		if (i % 2)
			AWAIT(has_generations(1));
		for (int pause = rand() % 400; pause; pause--)
			nap();
		kill(child, SIGKILL);
		CHECK(waitpid(child, &status, 0) == child);
		const char *seen = ask("look");
		int old, new;

		CHECK(sscanf(seen, "old %d new %d wrong 0", &old, &new) == 2 && old + new == THREADS);
		if (new) {
			ENDS(REFUSED, APPLY("trampoline"));
			CHECK(strstr(said, "--view generation"));
		}
	}
	CHECK(!strcmp(ask("release"), "released\n"));
	ENDS(DONE, APPLY("generation"));
	expect(0, THREADS);
	ENDS(DONE, REVERT("generation"));
	expect(THREADS, 0);
	/* A generation without threads may remain from the killed tool. */
	CHECK(!has_generations(1));
}

/* Killed between any two of its writes into the program, also those for the calls that it lets a thread make. */
static void patch_killed_anywhere(void)
{
	char *over[] = {"/stillpoint", "patch", "apply", "--pid", pid, "--view", "generation", "/fix.patch", NULL};
	char *back[] = {"/stillpoint", "patch", "revert", "--pid", pid, "--view", "generation", NULL};
	int count = 0, tries = 0, old, new;

	start_victim();
	expect(THREADS, 0);
	for (int there = 1; there >= 0; there--) {
		bool all = false;

		for (unsigned long n = 1; !all; n++)
			for (int twice = 0; twice < 2; twice++) {
				if (!there)
					ENDS(DONE, APPLY("generation", "--timeout", "60s"));
				all |= killed_at(n, there ? over : back, &count) < n;
				CHECK(sscanf(ask("look"), "old %d new %d wrong 0", &old, &new) == 2 && old + new == THREADS);
				ENDS(DONE, APPLY("generation", "--timeout", "60s"));
				expect(0, THREADS);
				ENDS(DONE, REVERT("generation", "--timeout", "60s"));
				expect(THREADS, 0);
				CHECK(!has_generations(1));
				tries++;
			}
	}
	printf("# %d of %d killed\n", count, tries);
	CHECK(count > tries / 2);
}

/* On a kernel without generations the tool reports this, and patches by trampolines. */
static void patch_refused(void)
{
	start_victim();
	ENDS(REFUSED, APPLY("generation"));
	CHECK(strstr(said, "this kernel does not support address-space generations"));
	ENDS(DONE, APPLY("trampoline"));
	expect(0, THREADS);
}

const struct test patching_tests[] = {
	{"patch_by_generation", patch_by_generation, 600},
	{"patch_constant", patch_constant, 600},
	{"patch_held", patch_held, 600},
	{"patch_suspended", patch_suspended, 600},
	{"patch_code", patch_code, 600},
	{"patch_staying", patch_staying, 600},
	{"patch_staying_local", patch_staying_local, 600},
	{"patch_staying_killed", patch_staying_killed, 1200},
	{"patch_staying_local_killed", patch_staying_local_killed, 1200},
	{"patch_workers", patch_workers, 600},
	{"patch_killed", patch_killed, 600},
	{"patch_killed_anywhere", patch_killed_anywhere, 1800},
	{}
};

const struct test refused_tests[] = {
	{"patch_refused", patch_refused, 120},
	{}
};
