// SPDX-License-Identifier: GPL-2.0
/*
 * TLB entries of address spaces that are not loaded (PCID). All on one processor: a wrong entry stays until the thread returns. The
 * processor has contexts for the kernel's side and for the user's, so both are checked.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

bool processor_has_contexts;

/* More contexts than Linux keeps on one processor (TLB_NR_DYN_ASIDS, 6). */
#define MANY 9

/* The machine has the features that its options claim. */
static void contexts_told(void)
{
	FILE *file = fopen("/proc/cpuinfo", "r");
	char line[4096];
	int processors = 0, with = 0;

	CHECK(file);
	while (fgets(line, sizeof(line), file)) {
		if (strncmp(line, "flags", 5))
			continue;
		processors++;
		with += strstr(line, " pcid ") || strstr(line, " pcid\n");
	}
	fclose(file);
	CHECK(processors > 0 && with == (processor_has_contexts ? processors : 0));
}

/* The byte that the kernel reads for this thread; -1 if it cannot. */
static int seen_by_kernel(const char *at)
{
	static int ends[2] = {-1, -1};
	char byte;

	if (ends[0] < 0)
		CHECK(pipe(ends) == 0);
	if (write(ends[1], at, 1) != 1)
		return -1;
	CHECK(read(ends[0], &byte, 1) == 1);
	return (unsigned char)byte;
}

static bool all_see(const volatile char *at, char wanted)
{
	return *at == wanted && seen_by_kernel((const char *)at) == wanted;
}

static bool nobody_sees(const volatile char *at)
{
	return faults(at) && seen_by_kernel((const char *)at) == -1;
}

/* More generations than there are contexts, in turns, and the base between them. */
static void contexts_in_turns(void)
{
	long generations[MANY];

	on_processor(0);
	pin_program();
	for (int i = 0; i < MANY; i++) {
		generations[i] = generation_of(2 + i);
		CHECK(write_to(generations[i], constant, (char[]){'A' + i}, 1) == 0);
	}
	for (int round = 0; round < 300; round++)
		for (int i = 0; i < MANY; i++) {
			/* steps of all lengths: some return to a context that is still there, some to one that was reused */
			int to = (i * (1 + round % MANY) + round) % MANY;

			CHECK(migrate(generations[to]) >= 0);
			CHECK(version() == 2 + to && all_see(constant, 'A' + to));
			if (round % 3)
				continue;
			CHECK(migrate(0) == generations[to]);
			CHECK(version() == 1 && all_see(constant, 'b'));
		}
}

static char *fresh(char *at, char value)
{
	char *page = mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0);

	CHECK(page != MAP_FAILED);
	*page = value;
	return page;
}

static long here, there;
static char *page;
static bool by_another;

/* Runs a function away from the tested memory: in another generation, or by another thread on another processor meanwhile. */
static void on_the_other(void *run)
{
	on_processor(1);
	((void (*)(void))run)();
}

static void away(void (*run)(void))
{
	CHECK(migrate(here) == there);
	if (by_another)
		in_thread(on_the_other, run);
	else
		run();
	CHECK(migrate(there) == here);
}

static void take_away(void)
{
	CHECK(munmap(page, PAGE) == 0);
}

static void put_another(void)
{
	fresh(page, 'y');
}

static void forbid(void)
{
	CHECK(mprotect(page, PAGE, PROT_NONE) == 0);
}

static void allow(void)
{
	CHECK(mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0);
}

static void forget(void)
{
	CHECK(madvise(page, PAGE, MADV_DONTNEED) == 0);
}

static void write_there(void)
{
	CHECK(write_to(there, constant, "w", 1) == 0);
}

static void flush_away(long from, long to)
{
	here = from;
	there = to;
	CHECK(migrate(there) >= 0);
	for (int round = 0; round < 50; round++) {
		page = fresh(NULL, 'x');
		CHECK(all_see(page, 'x'));
		away(put_another);
		CHECK(all_see(page, 'y'));
		away(forbid);
		CHECK(nobody_sees(page));
		away(allow);
		CHECK(all_see(page, 'y'));
		away(forget);
		CHECK(all_see(page, 0));
		away(take_away);
		CHECK(nobody_sees(page));
	}
	if (there) {
		CHECK(write_to(there, constant, "v", 1) == 0 && all_see(constant, 'v'));
		away(write_there);
		CHECK(all_see(constant, 'w'));
	}
	CHECK(migrate(0) == there);
}

/* An entry that is flushed while its context is not loaded is gone when the thread returns. */
static void contexts_flushed(void)
{
	on_processor(0);
	pin_program();
	long two = generation_of(2), three = generation_of(3);

	for (int i = 0; i < 2; i++) {
		by_another = i;
		flush_away(0, two);
		flush_away(two, 0);
		flush_away(two, three);
	}
	CHECK(version() == 1 && all_see(constant, 'b'));
}

/* A generation that replaces a deleted one inherits nothing from it. */
static void contexts_reused(void)
{
	on_processor(0);
	pin_program();
	for (int round = 0; round < 500; round++) {
		int number = 2 + round % 100;
		long generation = generation_of(number);

		CHECK(migrate(generation) == 0 && version() == number && all_see(constant, 'b'));
		CHECK(round % 10 ? migrate(0) == generation && delete(generation) == 0 : commit(generation) == 0);
		CHECK(version() == (round % 10 ? 2 + round / 10 * 10 % 100 : number));
	}
}

static atomic_int step;

static void *sleep_there(void *unused)
{
	on_processor(0);
	CHECK(migrate(there) == 0);
	for (int i = 0; i < 60; i++) {
		AWAIT(step == 2 * i + 1);
		CHECK(version() == 2 && all_see(page, 'a' + i % 26));
		step++;
	}
	return unused;
}

/* An idle processor still has the tables of its last process loaded and is not notified of flushes. */
static void contexts_idle(void)
{
	pthread_t thread;

	on_processor(1);
	pin_program();
	there = generation_of(2);
	page = fresh(NULL, 0);
	CHECK(pthread_create(&thread, NULL, sleep_there, NULL) == 0);
	for (int i = 0; i < 60; i++) {
		if (i % 2)
			fresh(page, 'a' + i % 26);
		else
			forget();
		*page = 'a' + i % 26;
		step++;
		AWAIT(step == 2 * i + 2);
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

const struct test contexts_tests[] = {
	{"contexts_told", contexts_told, 20},
	{"contexts_in_turns", contexts_in_turns, 120},
	{"contexts_flushed", contexts_flushed, 120},
	{"contexts_reused", contexts_reused, 120},
	{"contexts_idle", contexts_idle, 120},
	{0},
};
