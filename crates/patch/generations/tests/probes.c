// SPDX-License-Identifier: GPL-2.0
/* Probes of instructions (uprobes): a page that differs has the probes of its unchanged instructions, and nothing is left of them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

/* The first instruction of version(), which contains the number, and the one after it. */
#define FIRST (version_byte() - 1)
#define SECOND (version_byte() + 4)

static uint64_t offset_in_program(const char *at)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end, offset;
	char line[512];

	CHECK(maps);
	while (fgets(line, sizeof(line), maps))
		if (sscanf(line, "%lx-%lx %*s %lx", &start, &end, &offset) == 3 && start <= (uintptr_t)at && (uintptr_t)at < end) {
			fclose(maps);
			return (uintptr_t)at - start + offset;
		}
	failed(__FILE__, __LINE__, "the program is mapped");
}

/* Counts the executions of the instruction by this thread. */
static int probe(const char *at)
{
	struct perf_event_attr what = {
		.size = sizeof(what),
		.uprobe_path = (uintptr_t)"/proc/self/exe",
		.probe_offset = offset_in_program(at),
	};
	char text[16] = "";
	int type = open("/sys/bus/event_source/devices/uprobe/type", O_RDONLY);

	CHECK(type >= 0 && read(type, text, sizeof(text) - 1) > 0);
	close(type);
	what.type = (uint32_t)atoi(text);
	int found = (int)syscall(SYS_perf_event_open, &what, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);

	CHECK(found >= 0);
	return found;
}

static long count(int probe)
{
	uint64_t hits;

	CHECK(read(probe, &hits, sizeof(hits)) == sizeof(hits));
	return (long)hits;
}

/* Checks its result in the generation, and the number of hits of each instruction. */
static void expect_at(int line, long generation, int number, int first, int first_hits, int second, int second_hits)
{
	CHECK(migrate(generation) >= 0);
	long before_first = count(first), before_second = count(second);
	int found = version();
	long hits_first = count(first) - before_first, hits_second = count(second) - before_second;

	if (found != number || hits_first != first_hits || hits_second != second_hits) {
		printf("# line %d: version %d, noticed %ld and %ld times\n", line, found, hits_first, hits_second);
		CHECK(!"probes are where they should be");
	}
}

#define EXPECT(generation, number, first_hits, second_hits) \
	expect_at(__LINE__, generation, number, first, first_hits, second, second_hits)

/* The result is the same if the page is written before or after the probe. */
static void probed(void)
{
	int one = 1, five = 5;

	pin_program();
	long two = generation_of(2);

	CHECK(migrate(two) == 0 && version() == 2);
	int first = probe(FIRST), second = probe(SECOND);
	long three = generation_of(3), like = create(three);

	CHECK(like > 0);
	for (int round = 0; round < 3; round++) {
		EXPECT(0, 1, 1, 1);
		EXPECT(two, 2, 0, 1);
		EXPECT(three, 3, 0, 1);
		EXPECT(like, 3, 0, 1);
	}
	/* the same as the base again, and different again */
	CHECK(write_to(three, version_byte(), &one, sizeof(one)) == 0);
	EXPECT(three, 1, 1, 1);
	EXPECT(like, 3, 0, 1);
	CHECK(write_to(three, version_byte(), &five, sizeof(five)) == 0);
	EXPECT(three, 5, 0, 1);
	/* an instruction that is written unchanged */
	CHECK(write_to(three, FIRST, "\xb8\x06\0\0\0\xc3", 6) == 0);
	EXPECT(three, 6, 0, 1);
	CHECK(write_to(three, FIRST, "\xb8\x01\0\0\0\xc3", 6) == 0);
	EXPECT(three, 1, 1, 1);
	close(first);
	close(second);
	for (int round = 0; round < 3; round++) {
		CHECK(migrate(0) >= 0 && version() == 1);
		CHECK(migrate(two) == 0 && version() == 2);
		CHECK(migrate(three) == two && version() == 1);
		CHECK(migrate(like) == three && version() == 3);
	}
}

/* Probes of a generation that becomes the base. */
static void probed_commit(void)
{
	pin_program();
	long two = generation_of(2);
	int first = probe(FIRST), second = probe(SECOND);
	long three = generation_of(3);

	EXPECT(three, 3, 0, 1);
	CHECK(commit(three) == 0);
	EXPECT(0, 3, 0, 1);
	EXPECT(two, 2, 0, 1);
	close(second);
	close(first);
	CHECK(migrate(0) == two && version() == 3 && migrate(two) == 0 && version() == 2);
}

/* A child is not probed, and the parent still is. */
static void probed_fork(void)
{
	pin_program();
	long two = generation_of(2);
	int first = probe(FIRST), second = probe(SECOND);

	EXPECT(two, 2, 0, 1);
	for (int round = 0; round < 3; round++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child)
			_exit(!(version() == 2 && migrate(0) == two && version() == 1));
		CHECK(child_succeeds(child));
		EXPECT(two, 2, 0, 1);
	}
}

static atomic_bool over;

static void *run_version(void *generation)
{
	int number = 1;

	CHECK(migrate((long)generation) == 0);
	while (!over) {
		int found = version();

		CHECK(found >= number && found <= number + 100);
		number = found;
	}
	return NULL;
}

/* Probes are added and removed, and pages are written, while threads execute them. */
static void probes_come_and_go(void)
{
	enum { THREADS = 3, ROUNDS = 100 };
	pthread_t threads[THREADS];

	pin_program();
	long two = generation_of(2);

	for (long i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, run_version, (void *)(i ? two : 0)) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		int number = round + 3, first = probe(FIRST);

		if (round % 2)
			CHECK(write_to(two, version_byte(), &number, sizeof(number)) == 0);
		int second = probe(SECOND);

		if (round % 2 == 0)
			CHECK(write_to(two, version_byte(), &number, sizeof(number)) == 0);
		EXPECT(two, number, 0, 1);
		EXPECT(0, 1, 1, 1);
		close(round % 3 ? first : second);
		close(round % 3 ? second : first);
	}
	over = true;
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

const struct test probes_tests[] = {
	{"probed", probed, 60},
	{"probed_commit", probed_commit, 60},
	{"probed_fork", probed_fork, 60},
	{"probes_come_and_go", probes_come_and_go, 300},
	{0},
};
