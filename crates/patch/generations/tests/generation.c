// SPDX-License-Identifier: GPL-2.0
#include "generation.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "harness.h"

#define NR_ASGEN 548
#define NR_MSEAL 462

const char constant[8] = "base";

static uintptr_t code_end;

long asgen(unsigned int op, long generation, void *arg, size_t size)
{
	return syscall(NR_ASGEN, op, generation, arg, size);
}

long pin(void *start, size_t length)
{
	struct asgen_range range = {(uintptr_t)start, (uintptr_t)start + length};

	return asgen(ASGEN_PIN, 0, &range, sizeof(range));
}

long create(long like)
{
	return asgen(ASGEN_CREATE, like, NULL, 0);
}

long write_to(long generation, const void *at, const void *bytes, size_t length)
{
	struct asgen_write what = {(uintptr_t)at, (uintptr_t)bytes, length};

	return asgen(ASGEN_WRITE, generation, &what, sizeof(what));
}

long migrate(long generation)
{
	return asgen(ASGEN_MIGRATE, generation, NULL, 0);
}

long commit(long generation)
{
	return asgen(ASGEN_COMMIT, generation, NULL, 0);
}

long delete(long generation)
{
	return asgen(ASGEN_DELETE, generation, NULL, 0);
}

struct asgen_status status(long generation)
{
	struct asgen_status found;

	CHECK(asgen(ASGEN_STATUS, generation, &found, sizeof(found)) == 0);
	return found;
}

/* The number is the instruction's immediate, four bytes after its opcode. */
asm(".pushsection .text\n"
    ".balign 64\n"
    ".globl version\n"
    ".type version, @function\n"
    "version: .byte 0xb8\n"
    "version_number: .long 1\n"
    "ret\n"
    ".size version, . - version\n"
    ".balign 64\n"
    ".popsection\n");
extern char version_number[];

char *version_byte(void)
{
	return version_number;
}

void pin_program(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end;
	char line[512], access[8];

	CHECK(maps);
	while (fgets(line, sizeof(line), maps)) {
		CHECK(sscanf(line, "%lx-%lx %7s", &start, &end, access) == 3);
		bool code = start <= (uintptr_t)version && (uintptr_t)version < end;
		bool constants = start <= (uintptr_t)constant && (uintptr_t)constant < end;

		if (!code && !constants)
			continue;
		CHECK(access[1] == '-');
		CHECK(syscall(NR_MSEAL, start, end - start, 0) == 0);
		CHECK(pin((void *)start, end - start) == 0);
		if (code)
			code_end = end;
	}
	fclose(maps);
	CHECK(code_end);
}

long generation_of(int number)
{
	long generation = create(0);

	CHECK(generation > 0);
	CHECK(write_to(generation, version_byte(), &number, sizeof(number)) == 0);
	return generation;
}

char *next_to_code(size_t length)
{
	return (char *)((code_end | 0x1fffff) + 1 - 0x20000 - length);
}
