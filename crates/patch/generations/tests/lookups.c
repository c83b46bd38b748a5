// SPDX-License-Identifier: GPL-2.0
/* Lookups that do not use the CPU's usual page walk: pages for a pipe, and descriptors of segments. */
#define _GNU_SOURCE
#include <asm/ldt.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

/* Pages of the caller, without a copy. */
static void pages_for_a_pipe(void)
{
	int ends[2], number = 0;
	struct iovec what = {version_byte(), 4};

	pin_program();
	long two = generation_of(2);

	CHECK(pipe(ends) == 0);
	for (int round = 0; round < 3; round++) {
		CHECK(migrate(two) >= 0);
		CHECK(vmsplice(ends[1], &what, 1, 0) == 4 && read(ends[0], &number, 4) == 4 && number == 2);
		CHECK(migrate(0) == two);
		CHECK(vmsplice(ends[1], &what, 1, 0) == 4 && read(ends[0], &number, 4) == 4 && number == 1);
	}
}

static int in_segment = 0x1234;

static void describe(void *entry)
{
	struct user_desc segment = {
		.entry_number = (unsigned int)(uintptr_t)entry,
		.base_addr = (unsigned int)(uintptr_t)&in_segment,
		.limit = 0xfff,
		.seg_32bit = 1,
		.useable = 1,
	};

	CHECK(syscall(SYS_modify_ldt, 1, &segment, sizeof(segment)) == 0);
}

static int read_segment(unsigned int entry)
{
	unsigned int selector = entry << 3 | 7;
	int found;

	asm volatile("mov %1, %%gs\n\tmov %%gs:0, %0\n\tmov %2, %%gs" : "=r"(found) : "r"(selector), "r"(0) : "memory");
	return found;
}

/* With page-table isolation the CPU reads descriptors through a table of the process's own. */
static void segments(void)
{
	pin_program();
	long two = generation_of(2);

	CHECK(migrate(two) == 0);
	in_thread(describe, (void *)0);
	CHECK(read_segment(0) == 0x1234 && version() == 2);
	long three = generation_of(3);

	CHECK(migrate(three) == two && read_segment(0) == 0x1234 && version() == 3);
	in_thread(describe, (void *)600);
	CHECK(read_segment(600) == 0x1234 && read_segment(0) == 0x1234);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child)
		_exit(read_segment(600) != 0x1234 || version() != 3);
	CHECK(child_succeeds(child));
	CHECK(migrate(0) == three && read_segment(600) == 0x1234 && version() == 1);
}

const struct test lookups_tests[] = {
	{"pages_for_a_pipe", pages_for_a_pipe, 60},
	{"segments", segments, 60},
	{0},
};
