// SPDX-License-Identifier: GPL-2.0
/*
 * Costs of generations, one line each: name, microseconds of one operation. The clock is the machine's: if it counts instructions
 * (experiments/generations), the number is thousands of executed instructions.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

#define MIB (1ul << 20)
#define ROUNDS 5

static int by_size(const void *a, const void *b)
{
	double difference = *(const double *)a - *(const double *)b;

	return (difference > 0) - (difference < 0);
}

/* The median of some rounds, each with the given number of calls. */
static double cost(void (*once)(void), int times)
{
	double each[ROUNDS];

	for (int round = 0; round < ROUNDS; round++) {
		double start = now_s();

		for (int i = 0; i < times; i++)
			once();
		each[round] = (now_s() - start) / times * 1e6;
	}
	qsort(each, ROUNDS, sizeof(*each), by_size);
	return each[ROUNDS / 2];
}

/* Suffix of each measurement's name. */
static const char *where = "";

static void say(const char *what, double microseconds)
{
	printf("# cost: %s%s %.3f\n", what, where, microseconds);
}

static void null_call(void)
{
	syscall(SYS_getppid);
}

static char *page, *many;
#define MANY 1024

static void fault(void)
{
	for (char *at = many; at < many + MANY * PAGE; at += PAGE)
		*at = 1;
	madvise(many, MANY * PAGE, MADV_DONTNEED);
}

/* Reads from a page of zeros, which is shared. */
static void read_fault(void)
{
	for (volatile char *at = many; at < many + MANY * PAGE; at += PAGE)
		(void)*at;
	madvise(many, MANY * PAGE, MADV_DONTNEED);
}

/* Pages that a child shares with its parent are copied; the child terminates itself. */
static double copy_on_write(void)
{
	double each[ROUNDS];

	for (int round = 0; round < ROUNDS; round++) {
		memset(many, 1, MANY * PAGE);
		pid_t child = fork();

		if (!child) {
			pause();
			_exit(0);
		}
		double start = now_s();

		for (char *at = many; at < many + MANY * PAGE; at += PAGE)
			*at = 2;
		each[round] = (now_s() - start) * 1e6 / MANY;
		kill(child, SIGKILL);
		CHECK(waitpid(child, NULL, 0) == child);
	}
	madvise(many, MANY * PAGE, MADV_DONTNEED);
	qsort(each, ROUNDS, sizeof(*each), by_size);
	return each[ROUNDS / 2];
}

static int file;

static void map_file(void)
{
	char *at = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, file, 0);

	munmap(at, PAGE);
}

static void map_anonymous(void)
{
	char *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	munmap(at, PAGE);
}

static void map_and_unmap(void)
{
	char *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	*at = 1;
	munmap(at, PAGE);
}

static void protect(void)
{
	mprotect(page, PAGE, PROT_READ);
	mprotect(page, PAGE, PROT_READ | PROT_WRITE);
}

static int there[2], back[2];

/* A switch between two threads, or processes, on one CPU. */
static void turn(void)
{
	char byte = 0;

	CHECK(write(there[1], &byte, 1) == 1 && read(back[0], &byte, 1) == 1);
}

static void *partner(void *generation)
{
	char byte;

	CHECK(!generation || migrate((long)generation) >= 0);
	while (read(there[0], &byte, 1) == 1 && byte == 0)
		CHECK(write(back[1], &byte, 1) == 1);
	return NULL;
}

static double turns_with_thread(long generation)
{
	pthread_t thread;
	char end = 1;

	CHECK(pthread_create(&thread, NULL, partner, (void *)generation) == 0);
	double found = cost(turn, 2000) / 2;

	CHECK(write(there[1], &end, 1) == 1 && pthread_join(thread, NULL) == 0);
	return found;
}

static double turns_with_process(void)
{
	char end = 1;
	pid_t child = fork();

	if (!child) {
		partner(NULL);
		_exit(0);
	}
	double found = cost(turn, 2000) / 2;

	CHECK(write(there[1], &end, 1) == 1 && child_succeeds(child));
	return found;
}

static void fork_and_wait(void)
{
	pid_t child = fork();

	if (!child)
		_exit(0);
	CHECK(child_succeeds(child));
}

/* The same for every kernel: costs for a process without generations. */
static void without(void)
{
	say("null-call", cost(null_call, 20000));
	say("mmap-munmap-anonymous", cost(map_anonymous, 2000));
	say("mmap-munmap-file", cost(map_file, 2000));
	say("mmap-touch-munmap", cost(map_and_unmap, 2000));
	say("read-fault", cost(read_fault, 4) / MANY);
	say("write-fault", cost(fault, 4) / MANY);
	say("copy-on-write-fault", copy_on_write());
	say("mprotect", cost(protect, 2000));
	say("fork-exit", cost(fork_and_wait, 50));
	say("switch-threads", turns_with_thread(0));
	say("switch-processes", turns_with_process());
}

/* The same after another process has had generations since the machine started. */
static void without_beside(void)
{
	pid_t child = fork();

	if (!child) {
		execl("/proc/self/exe", "costs", "beside", NULL);
		_exit(1);
	}
	CHECK(child_succeeds(child));
}

static long other;

static void migrate_both_ways(void)
{
	migrate(other);
	migrate(0);
}

static void create_and_delete(void)
{
	long generation = create(0);

	CHECK(generation > 0 && delete(generation) == 0);
}

static void create_patched(void)
{
	CHECK(delete(generation_of(2)) == 0);
}

static void commit_patched(void)
{
	long generation = generation_of(2);

	CHECK(migrate(generation) == 0 && commit(generation) == 0);
}

/* Only the part of fork that the parent waits for. */
static double forking(void)
{
	double each[ROUNDS];

	for (int round = 0; round < ROUNDS; round++) {
		double start = now_s();
		pid_t child = fork();

		if (!child) {
			pause();
			_exit(0);
		}
		each[round] = (now_s() - start) * 1e6;
		kill(child, SIGKILL);
		CHECK(waitpid(child, NULL, 0) == child);
	}
	qsort(each, ROUNDS, sizeof(*each), by_size);
	return each[ROUNDS / 2];
}

static void sizes(void)
{
	static const unsigned int sizes[] = {0, 64, 256, 1024, 4096};
	struct sysinfo memory;
	char what[64];

	CHECK(sysinfo(&memory) == 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		size_t length = sizes[i] * MIB;

		if (length + 256 * MIB > memory.totalram * memory.mem_unit)
			break;
		char *touched = length ? mmap(NULL, length, PROT_READ | PROT_WRITE,
					      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0) : NULL;

		CHECK(touched != MAP_FAILED);
		snprintf(what, sizeof(what), "create-delete-%u", sizes[i]);
		say(what, cost(create_and_delete, 50));
		snprintf(what, sizeof(what), "create-write-delete-%u", sizes[i]);
		say(what, cost(create_patched, 50));
		snprintf(what, sizeof(what), "fork-%u", sizes[i]);
		say(what, forking());
		if (length)
			munmap(touched, length);
	}
}

int main(int argc, char **argv)
{
	cpu_set_t one;
	bool beside = argc > 1 && strcmp(argv[1], "beside") == 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	CPU_ZERO(&one);
	CPU_SET(0, &one);
	CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
	CHECK(pipe(there) == 0 && pipe(back) == 0);
	file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	CHECK(file >= 0);
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	many = mmap(NULL, MANY * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED && many != MAP_FAILED && madvise(many, MANY * PAGE, MADV_NOHUGEPAGE) == 0);
	where = beside ? "-beside" : "";
	without();
	if (beside || access("/proc/self/generations", F_OK))
		return 0;
	pin_program();
	other = generation_of(3);
	without_beside();
	say("migrate", cost(migrate_both_ways, 5000) / 2);
	say("switch-threads-of-two-generations", turns_with_thread(other));
	say("write-fault-with-generation", cost(fault, 4) / MANY);
	say("mprotect-with-generation", cost(protect, 2000));
	say("pages-of-one-patched-page", status(other).pages);
	say("tables-of-one-patched-page", status(other).tables);
	CHECK(migrate(other) == 0);
	say("null-call-in-generation", cost(null_call, 20000));
	say("write-fault-in-generation", cost(fault, 4) / MANY);
	say("mmap-touch-munmap-in-generation", cost(map_and_unmap, 2000));
	CHECK(migrate(0) == other && delete(other) == 0);
	say("create-write-migrate-commit", cost(commit_patched, 20));
	sizes();
	return 0;
}
