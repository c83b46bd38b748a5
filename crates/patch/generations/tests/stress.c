// SPDX-License-Identifier: GPL-2.0
/*
 * Threads of three generations pass memory to each other, in boxes, while all of them map, move, protect, discard, page out, fork and
 * change over. The thread that takes a box checks its contents.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"
#include "stress.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

double stress_s = 8;

void fill(char *at, size_t length, unsigned int seed)
{
	for (size_t i = 0; i < length; i += 512)
		*(unsigned int *)(at + i) = seed ^ (unsigned int)i;
}

bool holds(const char *at, size_t length, unsigned int seed)
{
	for (size_t i = 0; i < length; i += 512)
		if (*(const unsigned int *)(at + i) != (seed ^ (unsigned int)i))
			return false;
	return true;
}

enum { THREADS = 6, GENERATIONS = 3 };

struct worker {
	pthread_t thread;
	unsigned int random;
	int number;
	long generation;
	int version;
	/* Contents that the thread before this one put here. */
	atomic_bool full;
	char *at;
	size_t length;
	unsigned int seed;
};

static struct worker workers[THREADS];
static long generations[GENERATIONS];
static char static_data[1 << 16];
static atomic_long forks;

static unsigned int any(struct worker *me, unsigned int of)
{
	return (unsigned int)rand_r(&me->random) % of;
}

/* Maps memory near the code: with the same table, or one, two or three levels further up. NULL if the address is taken. */
static char *map_near(struct worker *me, size_t *length)
{
	uintptr_t after = (uintptr_t)next_to_code(0) + 0x20000, at;

	switch (any(me, 4)) {
	case 0:
		if (*length > 0x8000)
			*length = 0x3000;
		at = (uintptr_t)next_to_code(0x18000) + any(me, 16) * PAGE;
		break;
	case 1:
		at = after + 0x200000ul * (2 + any(me, 300)) + any(me, 512) * PAGE;
		break;
	case 2:
		at = 0x40000000ul + ((uintptr_t)any(me, 400) << 30) + any(me, 4) * PAGE;
		break;
	default:
		at = ((uintptr_t)(1 + any(me, 200)) << 39) + any(me, 8) * PAGE;
	}
	char *found = mmap((void *)at, *length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
			   -1, 0);

	return found == MAP_FAILED ? NULL : found;
}

static char *map_somewhere(size_t length, int sharing)
{
	char *at = mmap(NULL, length, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);

	CHECK(at != MAP_FAILED);
	return at;
}

static void take_box(struct worker *me)
{
	if (!me->full)
		return;
	CHECK(holds(me->at, me->length, me->seed));
	fill(me->at, me->length, ~me->seed);
	CHECK(holds(me->at, me->length, ~me->seed));
	if (any(me, 2)) {
		CHECK(madvise(me->at, me->length, MADV_DONTNEED) == 0);
		CHECK(*(int *)me->at == 0);
	}
	CHECK(munmap(me->at, me->length) == 0);
	me->full = false;
}

static void send_box(struct worker *me)
{
	struct worker *to = &workers[(me->number + 1) % THREADS];
	size_t length = any(me, 16) ? PAGE * (1 + any(me, 40)) : 4 << 20;
	unsigned int seed = any(me, 1u << 30);

	if (to->full)
		return;
	char *at = any(me, 3) ? map_near(me, &length) : map_somewhere(length, MAP_PRIVATE);

	if (!at)
		return;
	if (any(me, 2))
		madvise(at, length, MADV_HUGEPAGE);
	fill(at, length, seed);
	if (!any(me, 4)) {
		CHECK(mprotect(at, length, PROT_READ) == 0 && holds(at, length, seed));
		CHECK(mprotect(at, length, PROT_READ | PROT_WRITE) == 0);
	}
	if (!any(me, 4)) {
		char *place = map_somewhere(length, MAP_PRIVATE);

		at = mremap(at, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, place);
		CHECK(at == place);
	}
	to->at = at;
	to->length = length;
	to->seed = seed;
	to->full = true;
}

static void page_out(struct worker *me)
{
	size_t length = PAGE * (1 + any(me, 64));
	char *at = map_near(me, &length);

	if (!at)
		return;
	fill(at, length, 3);
	madvise(at, length / 2 & ~(PAGE - 1), MADV_PAGEOUT);
	CHECK(holds(at, length, 3) && munmap(at, length) == 0);
}

static void huge_pages(struct worker *me)
{
	size_t length = 4 << 20;
	char *at = mmap((void *)(0x20000000ul + (uintptr_t)me->number * 0x1000000), length, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	if (at == MAP_FAILED)
		return;
	madvise(at, length, MADV_HUGEPAGE);
	fill(at, length, 4);
	if (any(me, 2))
		madvise(at, length, MADV_COLLAPSE);
	CHECK(holds(at, length, 4) && mprotect(at + 3 * PAGE, PAGE, PROT_READ) == 0);
	CHECK(madvise(at + 0x200000, 5 * PAGE, MADV_DONTNEED) == 0);
	fill(at + 0x200000, 5 * PAGE, 4 ^ 0x200000);
	madvise(at, length, MADV_COLLAPSE);
	CHECK(holds(at, length, 4) && munmap(at, length) == 0);
}

static void fork_child(struct worker *me)
{
	int status;

	if (any(me, 4))
		return;
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		CHECK(version() == me->version);
		memset(static_data, 9, sizeof(static_data));
		char *at = map_somewhere(1 << 20, MAP_PRIVATE);

		fill(at, 1 << 20, 5);
		CHECK(holds(at, 1 << 20, 5));
		CHECK(migrate(0) == me->generation && version() == 1);
		CHECK(migrate(me->generation) == 0 && version() == me->version && holds(at, 1 << 20, 5));
		if (any(me, 2))
			execl("/proc/self/exe", "generations", "--version-number", NULL);
		_exit(1);
	}
	forks++;
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1);
	CHECK(static_data[any(me, sizeof(static_data))] != 9);
}

static void share(struct worker *me)
{
	char *at = map_somewhere(0x20000, MAP_SHARED);

	fill(at, 0x20000, 6);
	madvise(at, 0x20000, MADV_PAGEOUT);
	CHECK(holds(at, 0x20000, 6) && munmap(at, 0x20000) == 0);
	madvise(static_data, sizeof(static_data) / 2 & ~(PAGE - 1), MADV_PAGEOUT);
	static_data[any(me, sizeof(static_data))] = 0;
}

static void hop(struct worker *me)
{
	int to = (int)any(me, GENERATIONS);

	CHECK(migrate(generations[to]) == me->generation);
	me->generation = generations[to];
	me->version = to + 1;
}

/* Whole regions are mapped and unmapped, with their tables of the upper levels. */
static void alone_in_region(struct worker *me)
{
	char *at = mmap((void *)((uintptr_t)(210 + me->number) << 39), 2 * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	CHECK(at != MAP_FAILED);
	fill(at, 2 * PAGE, 7);
	CHECK(holds(at, 2 * PAGE, 7) && munmap(at, 2 * PAGE) == 0);
}

static void allocate(struct worker *me)
{
	size_t length = 1 + any(me, 300000);
	char *at = malloc(length);

	CHECK(at);
	memset(at, me->number, length);
	CHECK(at[length - 1] == me->number);
	free(at);
}

static void page_out_code(struct worker *me)
{
	(void)me;
	madvise((void *)((uintptr_t)version & ~(PAGE - 1)), PAGE, MADV_PAGEOUT);
	madvise((void *)((uintptr_t)constant & ~(PAGE - 1)), PAGE, MADV_PAGEOUT);
}

static void (*const deeds[])(struct worker *) = {
	send_box, send_box, send_box, send_box, page_out, page_out, huge_pages, fork_child,
	share, hop, alone_in_region, allocate, page_out_code,
};

static void *work(void *argument)
{
	struct worker *me = argument;
	double end = now_s() + stress_s;

	CHECK(migrate(me->generation) == 0);
	while (now_s() < end) {
		CHECK(version() == me->version);
		take_box(me);
		deeds[any(me, sizeof(deeds) / sizeof(deeds[0]))](me);
	}
	return NULL;
}

static void boxes(void)
{
	pin_program();
	for (int i = 1; i < GENERATIONS; i++)
		generations[i] = generation_of(i + 1);
	for (int i = 0; i < THREADS; i++) {
		workers[i].number = i;
		workers[i].random = (unsigned int)i * 7919 + 1;
		workers[i].generation = generations[i % GENERATIONS];
		workers[i].version = i % GENERATIONS + 1;
		CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
	}
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(workers[i].thread, NULL) == 0);
	struct asgen_status now = status(0);

	printf("# %ld forks, %llu fills, %llu drops\n", forks, now.fills, now.drops);
	CHECK(now.fills && now.drops);
	for (int i = 1; i < GENERATIONS; i++)
		CHECK(delete(generations[i]) == 0);
	CHECK(version() == 1);
}

const struct test stress_tests[] = {
	{"boxes", boxes, 600},
	{0},
};
