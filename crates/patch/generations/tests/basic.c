// SPDX-License-Identifier: GPL-2.0
/* Contents that a thread sees in its generation, and calls that are refused. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

#define REFUSED(call, number) CHECK((call) == -1 && errno == (number))

static void refusals(void)
{
	char *writable = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *plain = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char byte = 0;

	REFUSED(migrate(1), ESRCH);
	CHECK(migrate(0) == 0);
	REFUSED(write_to(1, version_byte(), &byte, 1), ESRCH);
	CHECK(asgen(ASGEN_REGISTER, 0, NULL, 0) == 0 && asgen(ASGEN_REGISTER, 0, NULL, 0) == 0);
	REFUSED(asgen(99, 0, NULL, 0), EINVAL);
	REFUSED(asgen(ASGEN_DELETE, -1, NULL, 0), EINVAL);
	REFUSED(pin(writable, PAGE), EPERM);
	REFUSED(pin(plain, PAGE), EPERM);
	REFUSED(pin(plain + 1, PAGE), EINVAL);
	REFUSED(pin(plain, 0), EINVAL);
	munmap(plain, PAGE);
	REFUSED(pin(plain, PAGE), ENOMEM);
	pin_program();
	long generation = create(0);

	CHECK(generation > 0);
	REFUSED(write_to(generation, writable, &byte, 1), EINVAL);
	REFUSED(write_to(generation, version_byte(), NULL, 1), EFAULT);
	REFUSED(write_to(generation, version_byte(), &byte, -1ul), EINVAL);
	REFUSED(create(generation + 1), ESRCH);
	REFUSED(delete(generation + 1), ESRCH);
	REFUSED(commit(generation + 1), ESRCH);
	REFUSED(asgen(ASGEN_STATUS, generation + 1, &byte, sizeof(struct asgen_status)), ESRCH);
	REFUSED(asgen(ASGEN_STATUS, generation, &byte, 1), EINVAL);
	CHECK(status(generation).pages == 0 && version() == 1);
	CHECK(delete(generation) == 0);
	REFUSED(delete(generation), ESRCH);
}

#define CALLS 100000

static _Atomic long *on_heap;
static _Atomic long in_bss;
static _Thread_local long in_tls;
static atomic_int go;

struct seen {
	pthread_t thread;
	long generation;
	int wanted, wrong;
};

static void *count(void *argument)
{
	struct seen *seen = argument;

	CHECK(migrate(seen->generation) == 0);
	while (!go)
		;
	for (int i = 0; i < CALLS; i++) {
		seen->wrong += version() != seen->wanted;
		++*on_heap;
		in_bss++;
		in_tls++;
	}
	CHECK(in_tls == CALLS);
	return NULL;
}

/* Threads see their own versions of the code, and all else in common. */
static void versions(void)
{
	pin_program();
	long two = generation_of(2), three = generation_of(3);
	struct seen seen[] = {{.wanted = 1}, {.generation = two, .wanted = 2}, {.generation = three, .wanted = 3},
			      {.generation = two, .wanted = 2}};

	on_heap = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&seen[i].thread, NULL, count, &seen[i]) == 0);
	go = 1;
	for (int i = 0; i < 4; i++) {
		CHECK(pthread_join(seen[i].thread, NULL) == 0);
		CHECK(seen[i].wrong == 0);
	}
	CHECK(*on_heap == 4 * CALLS && in_bss == 4 * CALLS);
	CHECK(version() == 1);
	CHECK(migrate(three) == 0 && version() == 3);
	CHECK(migrate(two) == three && version() == 2);
	CHECK(migrate(0) == two && version() == 1);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static int turn, rounds;

static void *take_turns(void *argument)
{
	struct seen *seen = argument;
	int mine = seen->generation != 0;

	CHECK(migrate(seen->generation) == 0);
	for (int i = 0; i < 1000; i++) {
		pthread_mutex_lock(&lock);
		while (turn != mine)
			pthread_cond_wait(&turned, &lock);
		turn = !turn;
		rounds++;
		seen->wrong += version() != seen->wanted;
		pthread_cond_broadcast(&turned);
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

static void handover(void)
{
	pin_program();
	struct seen seen[] = {{.wanted = 1}, {.generation = generation_of(2), .wanted = 2}};

	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&seen[i].thread, NULL, take_turns, &seen[i]) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(seen[i].thread, NULL) == 0 && seen[i].wrong == 0);
	CHECK(rounds == 2000);
}

static void constants(void)
{
	pin_program();
	long generation = create(0);
	int ends[2];
	char sent[8];

	CHECK(write_to(generation, constant, "other", 6) == 0);
	CHECK(migrate(generation) == 0);
	CHECK(!strcmp((const char *)(volatile const char *)constant, "other") && version() == 1);
	/* System calls see the same contents as the thread. */
	CHECK(pipe(ends) == 0 && write(ends[1], constant, 6) == 6 && read(ends[0], sent, 6) == 6);
	CHECK(!memcmp(sent, "other", 6));
	CHECK(migrate(0) == generation && !strcmp((const char *)(volatile const char *)constant, "base"));
}

/* Volatile, since compilers would evaluate the constant. */
static char third(void)
{
	return ((const volatile char *)constant)[2];
}

/* A generation that begins as a copy of another one, which is then changed or deleted. */
static void stacked(void)
{
	pin_program();
	long two = generation_of(2), both = create(two);
	int five = 5;

	CHECK(both > 0 && write_to(both, constant, "both", 5) == 0);
	CHECK(write_to(two, version_byte(), &five, sizeof(five)) == 0);
	CHECK(migrate(both) == 0 && version() == 2 && third() == 't');
	CHECK(migrate(two) == both && version() == 5 && third() == 's');
	CHECK(migrate(0) == two && delete(two) == 0);
	CHECK(migrate(both) == 0 && version() == 2);
}

/* Ranges in other tables of every level. */
static void spread(void)
{
	static const unsigned long places[] = {0x21000000, 0x3f9ff000, 0x700000000, 0x30000000000, 0x7e0000000000};
	enum { COUNT = sizeof(places) / sizeof(places[0]) };
	char byte = 99, *at[COUNT];

	pin_program();
	for (int i = 0; i < COUNT; i++) {
		at[i] = mmap((void *)places[i], 2 * PAGE, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
		CHECK(at[i] == (char *)places[i]);
		memset(at[i], i + 1, 2 * PAGE);
		CHECK(mprotect(at[i], 2 * PAGE, PROT_READ) == 0 && syscall(462, at[i], 2 * PAGE, 0) == 0);
		CHECK(pin(at[i], 2 * PAGE) == 0);
	}
	long two = generation_of(2);

	for (int i = 0; i < COUNT; i++)
		CHECK(write_to(two, at[i] + 4000, &byte, 1) == 0);
	for (int round = 0; round < 3; round++) {
		CHECK(migrate(two) == 0 && version() == 2);
		for (int i = 0; i < COUNT; i++)
			CHECK(at[i][4000] == 99 && at[i][3999] == i + 1 && at[i][8000] == i + 1);
		CHECK(migrate(0) == two && version() == 1);
		for (int i = 0; i < COUNT; i++)
			CHECK(at[i][4000] == i + 1);
	}
	CHECK(migrate(two) == 0 && commit(two) == 0 && version() == 2);
	for (int i = 0; i < COUNT; i++)
		CHECK(at[i][4000] == 99 && at[i][3999] == i + 1);
}

static atomic_int inside;

static void *watch(void *argument)
{
	int last = 2;

	CHECK(migrate((long)argument) == 0);
	inside = 1;
	while (last < 50) {
		int now = version();

		CHECK(now >= last);
		last = now;
	}
	return NULL;
}

/* Code that a thread is executing is replaced page by page, in one step each. */
static void written_inside(void)
{
	pthread_t thread;

	pin_program();
	long two = generation_of(2);

	CHECK(pthread_create(&thread, NULL, watch, (void *)two) == 0);
	AWAIT(inside);
	for (int number = 3; number <= 50; number++) {
		CHECK(write_to(two, version_byte(), &number, sizeof(number)) == 0);
		CHECK(version() == 1);
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

static bool five_levels(void)
{
	char flags[4096] = "";
	FILE *file = fopen("/proc/cpuinfo", "r");
	bool found = false;

	CHECK(file);
	while (!found && fgets(flags, sizeof(flags), file))
		found = !strncmp(flags, "flags", 5) && strstr(flags, " la57");
	fclose(file);
	return found;
}

/* The size of a generation does not depend on the memory of the process. */
static void size(void)
{
	pin_program();
	for (size_t length = 0; length <= 128ul << 20; length += 64ul << 20) {
		char *at = NULL;

		if (length) {
			at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			CHECK(at != MAP_FAILED && madvise(at, length, MADV_NOHUGEPAGE) == 0);
			memset(at, 1, length);
		}
		double start = now_s();

		for (int i = 0; i < 200; i++)
			CHECK(delete(create(0)) == 0);
		double made = now_s();
		pid_t child = fork();
		double forked = now_s();
		long two = create(0);

		CHECK(child >= 0 && two > 0);
		if (!child)
			_exit(0);
		CHECK(child_succeeds(child) && status(two).tables == 0);
		CHECK(write_to(two, version_byte(), "\2", 1) == 0);
		CHECK(status(two).tables == (five_levels() ? 4u : 3u) && status(two).pages == 1);
		printf("# %3zu MiB touched: created and deleted in %4.0f us (fork: %6.0f us)\n", length >> 20, (made - start) * 5e3,
		       (forked - made) * 1e6);
		CHECK(delete(two) == 0);
		if (at)
			CHECK(munmap(at, length) == 0);
	}
}

static char *fresh;

static void map_fresh(void *unused)
{
	(void)unused;
	fresh = mmap((void *)0x380000000000, PAGE, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	CHECK(fresh != MAP_FAILED);
	memset(fresh, 0, PAGE);
}

/* Memory that is not yet in the overlay and that the kernel touches first, also where it may not wait for a fault. */
static void kernel_first(void)
{
	struct timespec soon = {.tv_nsec = 1000000};
	int ends[2];

	pin_program();
	long two = generation_of(2);

	CHECK(migrate(two) == 0);
	CHECK(migrate(0) == two);
	in_thread(map_fresh, NULL);
	CHECK(migrate(two) == 0);
	CHECK(syscall(SYS_futex, fresh, FUTEX_WAKE_OP, 1, 1, fresh + 64,
		      FUTEX_OP(FUTEX_OP_ADD, 5, FUTEX_OP_CMP_EQ, 0)) >= 0);
	CHECK(*(int *)(fresh + 64) == 5);
	CHECK(syscall(SYS_futex, fresh + 128, FUTEX_WAIT, 0, &soon, NULL, 0) == -1 && errno == ETIMEDOUT);
	CHECK(pipe(ends) == 0 && write(ends[1], "abcdefgh", 8) == 8 && read(ends[0], fresh + 256, 8) == 8);
	CHECK(!memcmp(fresh + 256, "abcdefgh", 8));
}

const struct test basic_tests[] = {
	{"refusals", refusals, 60},
	{"versions", versions, 120},
	{"handover", handover, 120},
	{"constants", constants, 60},
	{"stacked", stacked, 60},
	{"spread", spread, 60},
	{"written_inside", written_inside, 120},
	{"size", size, 120},
	{"kernel_first", kernel_first, 60},
	{0},
};
