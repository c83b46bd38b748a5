// SPDX-License-Identifier: GPL-2.0
/* Creation and end of generations and threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

static atomic_int inside, stop;
static atomic_long target;

static void *stay(void *argument)
{
	int wanted = 2;

	CHECK(migrate((long)argument) == 0);
	inside++;
	while (!stop)
		CHECK(version() == wanted);
	return NULL;
}

/* A deleted generation is freed with its last thread, and not before. */
static void deferred_delete(void)
{
	pthread_t threads[2];

	pin_program();
	long two = generation_of(2);

	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, stay, (void *)two) == 0);
	AWAIT(inside == 2);
	CHECK(status(two).threads == 2);
	CHECK(delete(two) == 0);
	CHECK(migrate(two) == -1 && errno == ESRCH);
	CHECK(delete(two) == -1 && errno == ESRCH);
	for (int i = 0; i < 200; i++)
		nap();
	CHECK(status(0).generations == 1);
	stop = 1;
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	AWAIT(status(0).generations == 0);
}

static void *visit(void *argument)
{
	CHECK(migrate((long)argument) == 0);
	CHECK(version() == 2);
	return NULL;
}

static void *bystander(void *unused)
{
	(void)unused;
	while (!stop) {
		char *at = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		CHECK(at != MAP_FAILED);
		memset(at, 7, 16 * PAGE);
		CHECK(munmap(at, 16 * PAGE) == 0 && version() == 1);
	}
	return NULL;
}

static void churn(void)
{
	pthread_t others[2], visitor;

	pin_program();
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&others[i], NULL, bystander, NULL) == 0);
	for (int i = 0; i < 100; i++) {
		long two = generation_of(2);

		CHECK(pthread_create(&visitor, NULL, visit, (void *)two) == 0);
		if (i & 1) {
			CHECK(migrate(two) == 0 && version() == 2);
			CHECK(migrate(0) == two);
		}
		if (i & 2) {
			CHECK(pthread_join(visitor, NULL) == 0);
			CHECK(delete(two) == 0);
		} else {
			AWAIT(status(two).threads == 0);
			CHECK(pthread_join(visitor, NULL) == 0);
			CHECK(delete(two) == 0);
		}
	}
	stop = 1;
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(others[i], NULL) == 0);
	AWAIT(status(0).generations == 0);
}

static int exit_status(pid_t child)
{
	int status;

	CHECK(waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static pid_t exec_version(pid_t (*new)(void))
{
	pid_t child = new();

	if (!child) {
		execl("/proc/self/exe", "generations", "--version-number", NULL);
		_exit(99);
	}
	return child;
}

/* A child has its parent's generation under the same number, and its own copy. */
static void forked(void)
{
	pin_program();
	long two = generation_of(2);

	generation_of(3);
	CHECK(migrate(two) == 0);
	for (int round = 0; round < 5; round++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			int seven = 7;

			CHECK(version() == 2 && status(two).threads == 1 && status(0).generations == 1);
			CHECK(write_to(two, version_byte(), &seven, sizeof(seven)) == 0 && version() == 7);
			CHECK(migrate(0) == two && version() == 1);
			CHECK(migrate(two) == 0 && version() == 7);
			CHECK(generation_of(3) > two && commit(two) == 0 && version() == 7);
			_exit(0);
		}
		CHECK(exit_status(child) == 0 && version() == 2);
		CHECK(exit_status(exec_version(fork)) == 1);
		CHECK(exit_status(exec_version(vfork)) == 1);
		CHECK(version() == 2);
	}
}

static void ends_inside(int how)
{
	pthread_t thread;

	pin_program();
	long two = generation_of(2);

	inside = 0;
	for (int i = 0; i < 3; i++)
		CHECK(pthread_create(&thread, NULL, stay, (void *)two) == 0);
	AWAIT(inside == 3);
	if (how & 1)
		CHECK(migrate(two) == 0);
	if (how < 2)
		_exit(1);
	if (how < 4) {
		execl("/proc/self/exe", "generations", "--version-number", NULL);
		_exit(99);
	}
	kill(getpid(), SIGKILL);
}

static void ends(void)
{
	for (int round = 0; round < 18; round++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child)
			ends_inside(round % 6);
		CHECK(exit_status(child) == (round % 6 < 4 ? 1 : -SIGKILL));
	}
}

static atomic_int migrated;

static void *follow(void *unused)
{
	int last = 1;
	bool there = false;

	(void)unused;
	inside++;
	while (!stop) {
		if (!there && target) {
			CHECK(migrate(target) == 0);
			there = true;
			migrated++;
		}
		int now = version();

		CHECK(there ? now == 2 : now >= last);
		last = now;
	}
	return NULL;
}

/* Once all threads are in it, the generation becomes the base, and costs nothing any more. */
static void committed(void)
{
	pthread_t threads[3];

	pin_program();
	long two = generation_of(2);

	for (int i = 0; i < 3; i++)
		CHECK(pthread_create(&threads[i], NULL, follow, NULL) == 0);
	AWAIT(inside == 3);
	CHECK(commit(two) == -1 && errno == EBUSY);
	CHECK(migrate(two) == 0);
	CHECK(commit(two) == -1 && errno == EBUSY);
	target = two;
	AWAIT(migrated == 3);
	CHECK(commit(two) == 0);
	CHECK(migrate(0) == 0 && version() == 2);
	CHECK(delete(two) == -1 && errno == ESRCH);
	AWAIT(status(0).generations == 0);
	stop = 1;
	for (int i = 0; i < 3; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	long three = generation_of(3);

	CHECK(migrate(three) == 0 && version() == 3 && commit(three) == 0 && version() == 3);
}

static atomic_int halted, go;

static void *stay_in_three(void *unused)
{
	(void)unused;
	inside++;
	while (!stop)
		CHECK(version() == 3);
	return NULL;
}

/* Waits while a generation is committed, and sees the new version when it continues. */
static void *halt(void *generation)
{
	CHECK(migrate((long)generation) == 0);
	halted++;
	while (!go)
		nap();
	CHECK(version() == 2);
	return NULL;
}

/* Threads in the base, or in the generation, are in the new base at once; those elsewhere stay there. */
static void committed_wherever(void)
{
	pthread_t base, there, elsewhere;

	pin_program();
	long two = generation_of(2), three = generation_of(3);

	stop = 0;
	CHECK(pthread_create(&base, NULL, halt, (void *)0) == 0);
	CHECK(pthread_create(&there, NULL, halt, (void *)two) == 0);
	CHECK(migrate(three) == 0 && version() == 3);
	CHECK(pthread_create(&elsewhere, NULL, stay_in_three, NULL) == 0);
	CHECK(migrate(0) == three);
	AWAIT(halted == 2 && inside == 1);
	CHECK(commit(two) == -1 && errno == EBUSY && version() == 1);
	CHECK(asgen(ASGEN_COMMIT_WHEREVER, two, NULL, 0) == 0 && version() == 2);
	CHECK(asgen(ASGEN_COMMIT_WHEREVER, two, NULL, 0) == -1 && errno == ESRCH);
	go = 1;
	CHECK(pthread_join(base, NULL) == 0 && pthread_join(there, NULL) == 0);
	AWAIT(status(0).generations == 1 && status(three).threads == 1);
	stop = 1;
	CHECK(pthread_join(elsewhere, NULL) == 0 && delete(three) == 0);
	AWAIT(status(0).generations == 0);
}

const struct test life_tests[] = {
	{"deferred_delete", deferred_delete, 120},
	{"churn", churn, 240},
	{"forked", forked, 120},
	{"ends", ends, 240},
	{"committed", committed, 120},
	{"committed_wherever", committed_wherever, 120},
	{0},
};
