// SPDX-License-Identifier: GPL-2.0
/* Pages of 2 MiB that are made, split, and shared. */
#define _GNU_SOURCE
#include <stdio.h>
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
#define HUGE 0x200000ul

static long two;

static void enter(void)
{
	pin_program();
	two = generation_of(2);
	CHECK(migrate(two) == 0);
}

static void change_over(void)
{
	CHECK(migrate(status(0).current_generation ? 0 : two) >= 0);
}

/* Beside the code: the overlay's own table has them as leaves. */
static void transparent(void)
{
	const size_t length = 2 * HUGE;

	enter();
	for (int round = 0; round < 8; round++) {
		char *at = mmap((void *)0x20000000, length, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

		CHECK(at == (char *)0x20000000 && madvise(at, length, MADV_HUGEPAGE) == 0);
		fill(at, length, 1);
		change_over();
		CHECK(holds(at, length, 1));
		if (round & 1)
			CHECK(madvise(at, length, MADV_COLLAPSE) == 0);
		CHECK(mprotect(at + 3 * PAGE, PAGE, PROT_READ) == 0 && mprotect(at + 3 * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
		CHECK(madvise(at + HUGE, 5 * PAGE, MADV_DONTNEED) == 0 && at[HUGE] == 0);
		fill(at + HUGE, 5 * PAGE, 1 ^ (unsigned int)HUGE);
		change_over();
		CHECK(holds(at, length, 1));
		CHECK(madvise(at, length, MADV_COLLAPSE) == 0);
		CHECK(holds(at, length, 1));
		fill(at, length, 2);
		if (round % 3 == 0)
			change_over();
		CHECK(holds(at, length, 2));
		CHECK(munmap(at, length) == 0);
	}
}

static void reserved(void)
{
	FILE *count = fopen("/proc/sys/vm/nr_hugepages", "w");

	CHECK(count && fputs("12", count) >= 0 && fclose(count) == 0);
	enter();
	for (unsigned int round = 0; round < 6; round++) {
		int status;
		char *at = mmap((void *)0x30000000, 2 * HUGE, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_FIXED_NOREPLACE, -1, 0);

		CHECK(at == (char *)0x30000000);
		fill(at, 2 * HUGE, round);
		change_over();
		CHECK(holds(at, 2 * HUGE, round));
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			fill(at, HUGE, ~round);
			_exit(!holds(at, HUGE, ~round));
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		CHECK(holds(at, 2 * HUGE, round));
		fill(at, 2 * HUGE, round + 9);
		change_over();
		CHECK(holds(at, 2 * HUGE, round + 9) && munmap(at, 2 * HUGE) == 0);
	}
}

/* Shared pages of a whole gigabyte: processes share the table, which one of them then leaves. */
static void shared_tables(void)
{
	const size_t length = 1ul << 30;
	int file = memfd_create("huge", MFD_HUGETLB);
	FILE *count = fopen("/proc/sys/vm/nr_hugepages", "w");

	CHECK(count && fputs("12", count) >= 0 && fclose(count) == 0);
	CHECK(file >= 0 && ftruncate(file, (off_t)length) == 0);
	enter();
	for (unsigned int round = 0; round < 4; round++) {
		int status;
		char *at = mmap((void *)0x80000000, length, PROT_READ | PROT_WRITE,
				MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file, 0);

		CHECK(at == (char *)0x80000000 && migrate(two) >= 0);
		fill(at, 2 * HUGE, round);
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			bool good = holds(at, 2 * HUGE, round);

			fill(at, 2 * HUGE, ~round);
			change_over();
			good &= holds(at, 2 * HUGE, ~round) && munmap(at, length) == 0;
			_exit(!good);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		CHECK(holds(at, 2 * HUGE, ~round));
		change_over();
		CHECK(holds(at, 2 * HUGE, ~round) && munmap(at, length) == 0);
	}
}

const struct test huge_tests[] = {
	{"transparent", transparent, 240},
	{"reserved", reserved, 240},
	{"shared_tables", shared_tables, 240},
	{0},
};
