// SPDX-License-Identifier: GPL-2.0
/*
 * TLB contexts that all processors have in common (INVLPGB): a process that runs on four of them at a time gets one, and flushes it
 * without interrupting other processors. A process that gets generations leaves it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

bool processor_broadcasts;

enum { FLUSHES = 20 };

/* Flushes of the whole machine for which other processors were interrupted. */
static long interruptions(void)
{
	FILE *file = fopen("/proc/vmstat", "r");
	char line[128];
	long count = -1;

	CHECK(file);
	while (fgets(line, sizeof(line), file))
		sscanf(line, "nr_tlb_remote_flush %ld", &count);
	fclose(file);
	CHECK(count >= 0);
	return count;
}

static char *new_page(char *at)
{
	char *page = mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0);

	CHECK(page != MAP_FAILED);
	return page;
}

static long interruptions_by_flushes(void)
{
	char *page = new_page(NULL);
	long before = interruptions();

	for (int i = 0; i < FLUSHES; i++) {
		*page = 1;
		CHECK(mprotect(page, PAGE, PROT_READ) == 0 && mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0);
	}
	long count = interruptions() - before;

	CHECK(munmap(page, PAGE) == 0);
	return count;
}

struct crowd {
	pthread_t threads[64];
	long count;
};

static atomic_bool over;
static atomic_int there;

static void *spin(void *processor)
{
	on_processor((int)(long)processor);
	there++;
	while (!over)
		;
	return NULL;
}

/* Starts a thread on each other processor. */
static void gather(struct crowd *crowd)
{
	crowd->count = sysconf(_SC_NPROCESSORS_ONLN) - 1;
	CHECK(crowd->count >= 3 && crowd->count < 64);
	over = false;
	there = 0;
	on_processor(0);
	for (long i = 0; i < crowd->count; i++)
		CHECK(pthread_create(&crowd->threads[i], NULL, spin, (void *)(i + 1)) == 0);
	AWAIT(there == crowd->count);
}

static void disperse(struct crowd *crowd)
{
	over = true;
	for (long i = 0; i < crowd->count; i++)
		CHECK(pthread_join(crowd->threads[i], NULL) == 0);
	on_processor(-1);
}

/* Repeats, since only some flushes of a process check if it qualifies. */
void take_global_context(void)
{
	struct crowd crowd;

	gather(&crowd);
	while (interruptions_by_flushes())
		;
	disperse(&crowd);
}

static bool flushes_interrupt(void)
{
	struct crowd crowd;

	gather(&crowd);
	long count = interruptions_by_flushes();

	disperse(&crowd);
	return count >= FLUSHES;
}

/* The context of the test's start is no longer used; that of a process without generations is. */
static void global_left(void)
{
	CHECK(!flushes_interrupt());
	pin_program();
	CHECK(flushes_interrupt());
	long two = generation_of(2);

	CHECK(migrate(two) == 0 && version() == 2 && migrate(0) == two && version() == 1);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		CHECK(version() == 1);
		take_global_context();
		CHECK(!flushes_interrupt());
		_exit(0);
	}
	CHECK(child_succeeds(child));
	CHECK(flushes_interrupt());
}

static volatile char *page;
static atomic_int put, seen;

static void *look(void *unused)
{
	on_processor(1);
	for (int i = 0; i < 20; i++) {
		while (put == i)
			(void)*page;
		CHECK(*page == 'b' + i);
		seen++;
	}
	return unused;
}

/* A thread that never enters the kernel sees changes from the moment at which its process has generations. */
static void global_left_running(void)
{
	pthread_t thread;

	page = new_page(NULL);
	*page = 'a';
	CHECK(pthread_create(&thread, NULL, look, NULL) == 0);
	on_processor(0);
	nap();
	CHECK(interruptions_by_flushes() < FLUSHES);
	pin_program();
	/* this processor has left the global context */
	CHECK(migrate(generation_of(2)) == 0 && migrate(0) > 0);
	for (int i = 0; i < 20; i++) {
		/* the old page is moved elsewhere: a thread with a stale entry sees the old value */
		CHECK(mremap((char *)page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, new_page(NULL)) !=
		      MAP_FAILED);
		*page = 'b' + i;
		put++;
		AWAIT(seen > i);
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

/* All processors are in the global context, and some of their threads change to generations while others flush. */
static void *come_and_go(void *generation)
{
	for (int i = 0; i < 200; i++) {
		char *mine = new_page(NULL);

		*mine = 1;
		CHECK(migrate((long)generation) == 0 && version() == 2 && *mine == 1);
		new_page(mine);
		CHECK(*mine == 0 && migrate(0) == (long)generation && version() == 1 && *mine == 0);
		CHECK(munmap(mine, PAGE) == 0);
	}
	return NULL;
}

static void global_crowded(void)
{
	struct crowd crowd;
	pthread_t threads[3];

	gather(&crowd);
	CHECK(interruptions_by_flushes() < FLUSHES);
	pin_program();
	long two = generation_of(2);

	for (int i = 0; i < 3; i++)
		CHECK(pthread_create(&threads[i], NULL, come_and_go, (void *)two) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	disperse(&crowd);
}

const struct test global_tests[] = {
	{"global_left", global_left, 120},
	{"global_left_running", global_left_running, 60},
	{"global_crowded", global_crowded, 120},
	{0},
};
