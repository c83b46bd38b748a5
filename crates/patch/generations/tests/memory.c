// SPDX-License-Identifier: GPL-2.0
/*
 * Every generation sees the process's changes of its memory. Each test fails reliably if one rule of the kernel is broken; stress.c is
 * for cases that have no test of their own.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

static char *map_at(void *place, size_t length)
{
	char *at = mmap(place, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (place ? MAP_FIXED_NOREPLACE : 0),
			-1, 0);

	CHECK(at != MAP_FAILED && (!place || at == place));
	return at;
}

struct step {
	char *at;
	size_t length;
	int what;
};

enum { UNMAP, FORBID, EMPTY, READ_ONLY, PAGE_OUT, FREE_LAZILY };

static void step_in_base(void *argument)
{
	struct step *step = argument;

	CHECK(migrate(0) >= 0);
	switch (step->what) {
	case UNMAP:
		CHECK(munmap(step->at, step->length) == 0);
		break;
	case FORBID:
		CHECK(mprotect(step->at, step->length, PROT_NONE) == 0);
		break;
	case READ_ONLY:
		CHECK(mprotect(step->at, step->length, PROT_READ) == 0);
		break;
	case EMPTY:
		CHECK(madvise(step->at, step->length, MADV_DONTNEED) == 0);
		break;
	case PAGE_OUT:
		CHECK(madvise(step->at, step->length, MADV_PAGEOUT) == 0);
		break;
	case FREE_LAZILY:
		CHECK(madvise(step->at, step->length, MADV_FREE) == 0);
		break;
	}
}

static void in_base(int what, char *at, size_t length)
{
	in_thread(step_in_base, &(struct step){at, length, what});
}

static long enter_two(void)
{
	pin_program();
	long two = generation_of(2);

	CHECK(migrate(two) == 0 && version() == 2);
	return two;
}

/* Pages that share their table with the code: the overlay has copies of their entries. */
static void leaves(void)
{
	enter_two();
	char *at = map_at(next_to_code(8 * PAGE), 8 * PAGE);

	memset(at, 1, 8 * PAGE);
	in_base(EMPTY, at, PAGE);
	CHECK(at[0] == 0 && at[PAGE] == 1);
	in_base(READ_ONLY, at + PAGE, PAGE);
	CHECK(at[PAGE] == 1);
	in_base(FORBID, at + 2 * PAGE, PAGE);
	CHECK(faults(at + 2 * PAGE));
	in_base(UNMAP, at + 3 * PAGE, 2 * PAGE);
	CHECK(faults(at + 3 * PAGE) && faults(at + 4 * PAGE) && at[5 * PAGE] == 1);
	map_at(at + 3 * PAGE, PAGE);
	CHECK(at[3 * PAGE] == 0);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		memset(at + 5 * PAGE, 9, 3 * PAGE);
		_exit(0);
	}
	memset(at + 6 * PAGE, 3, PAGE);
	CHECK(waitpid(child, NULL, 0) == child && at[5 * PAGE] == 1 && at[6 * PAGE] == 3);
}

static void write_on(void *argument)
{
	char *at = argument;

	CHECK(migrate(0) >= 0);
	at[0] = 2;
}

/* Pages whose tables the overlay shares, at each level: the tables are freed, and others replace them. */
static void tables(void)
{
	unsigned long places[] = {((unsigned long)next_to_code(0) | 0x1fffff) + 1 + 0x8000000, 0x80000000, 0x200000000,
				  0x90000000000, 0x6a0000000000};

	enter_two();
	for (int round = 0; round < 4; round++)
		for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
			char *at = map_at((void *)places[i], 4 * PAGE);

			memset(at, 1, 4 * PAGE);
			in_base(UNMAP, at, 4 * PAGE);
			CHECK(faults(at));
			/* The former tables are now used for other data. */
			char *other = map_at(NULL, 64 * PAGE);

			memset(other, 0, 64 * PAGE);
			CHECK(map_at(at, 4 * PAGE) == at);
			in_thread(write_on, at);
			CHECK(at[0] == 2 && at[PAGE] == 0);
			CHECK(munmap(at, 4 * PAGE) == 0 && munmap(other, 64 * PAGE) == 0);
		}
}

/* Whole tables of pages are moved. */
static void moved(void)
{
	const size_t length = 0x400000;

	enter_two();
	char *from = map_at((void *)0x70000000, length), *to = (char *)0x78000000;

	for (int round = 0; round < 6; round++) {
		CHECK(madvise(from, length, MADV_NOHUGEPAGE) == 0);
		for (size_t i = 0; i < length; i += PAGE)
			from[i] = (char)(i / PAGE + (size_t)round);
		CHECK(mremap(from, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
		for (size_t i = 0; i < length; i += PAGE)
			CHECK(to[i] == (char)(i / PAGE + (size_t)round));
		CHECK(faults(from));
		char *other = from;

		from = to;
		to = other;
	}
}

/* More pages than a CPU keeps for itself before reclaim may find them. */
enum { RECLAIMED = 64 };

static atomic_int stop;
static char *pages;
static long rounds, reclaimed;

static void on_cpu(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	CHECK(sched_setaffinity(0, sizeof(set), &set) == 0);
}

static int swapped_out(void)
{
	uint64_t entries[RECLAIMED];
	int map = open("/proc/self/pagemap", O_RDONLY), out = 0;

	CHECK(map >= 0);
	CHECK(pread(map, entries, sizeof(entries), (off_t)((uintptr_t)pages / PAGE * 8)) == sizeof(entries));
	close(map);
	for (int i = 0; i < RECLAIMED; i++)
		out += entries[i] >> 62 & 1;
	return out;
}

static void *reclaim(void *unused)
{
	double end = now_s() + 3;

	(void)unused;
	CHECK(migrate(0) >= 0);
	on_cpu(1);
	while (now_s() < end) {
		CHECK(madvise(pages, RECLAIMED * PAGE, MADV_PAGEOUT) == 0);
		rounds++;
		reclaimed += swapped_out();
	}
	stop = 1;
	return NULL;
}

static volatile long *number_in(int page)
{
	return (volatile long *)(pages + (size_t)page * PAGE);
}

/* Reclaim takes pages from a running thread, and flushes them later, together. */
static void batch(void)
{
	pthread_t thread;
	long counted = 0;

	CHECK(sysconf(_SC_NPROCESSORS_ONLN) > 1);
	enter_two();
	pages = map_at(next_to_code(RECLAIMED * PAGE), RECLAIMED * PAGE);
	on_cpu(0);
	CHECK(pthread_create(&thread, NULL, reclaim, NULL) == 0);
	for (; !stop; counted++)
		for (int i = 0; i < RECLAIMED; i++)
			CHECK((*number_in(i))++ == counted);
	/* A stale entry shows the values that were written through it; the base does not. */
	CHECK(pthread_join(thread, NULL) == 0 && counted > 0 && migrate(0) > 0);
	for (int i = 0; i < RECLAIMED; i++)
		CHECK(*number_in(i) == counted);
	printf("# %ld pages seen swapped out in %ld rounds\n", reclaimed, rounds);
	CHECK(reclaimed);
}

/* Pages that are discarded unless written: the base must know of the write. */
static void dirty(void)
{
	/* Reclaim finds the pages that this CPU keeps for itself. */
	on_cpu(0);
	enter_two();
	for (int round = 0; round < 10; round++) {
		char *at = map_at(next_to_code(RECLAIMED * PAGE), RECLAIMED * PAGE);

		memset(at, 1, RECLAIMED * PAGE);
		in_base(FREE_LAZILY, at, RECLAIMED * PAGE);
		/* The entry is copied by a read, or by the write itself. */
		if (round & 1)
			for (int i = 0; i < RECLAIMED; i++)
				CHECK(((volatile char *)at)[(size_t)i * PAGE] < 2);
		for (int i = 0; i < RECLAIMED; i++)
			at[(size_t)i * PAGE] = 3;
		in_base(PAGE_OUT, at, RECLAIMED * PAGE);
		for (int i = 0; i < RECLAIMED; i++)
			CHECK(at[(size_t)i * PAGE] == 3);
		CHECK(munmap(at, RECLAIMED * PAGE) == 0);
	}
}

const struct test memory_tests[] = {
	{"leaves", leaves, 60},
	{"tables", tables, 120},
	{"moved", moved, 120},
	{"batch", batch, 120},
	{"dirty", dirty, 120},
	{0},
};
