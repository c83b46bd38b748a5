/* SPDX-License-Identifier: GPL-2.0 */
/* asgen(2) as functions, and a function of which generations have different versions. */
#ifndef GENERATION_H
#define GENERATION_H

#include <stddef.h>

#include "../kernel/files/include/uapi/linux/asgen.h"

#define PAGE 4096ul

long asgen(unsigned int op, long generation, void *arg, size_t size);
long pin(void *start, size_t length);
long create(long like);
long write_to(long generation, const void *at, const void *bytes, size_t length);
long migrate(long generation);
long commit(long generation);
long delete(long generation);
struct asgen_status status(long generation);

/* Returns 1 in the base. */
int version(void);
/* Address of the number in its code. */
char *version_byte(void);
/* A constant among read-only data; "base" in the base. */
extern const char constant[8];

/* Seals and pins this program's code and constants; memory on both sides of them shares their tables. */
void pin_program(void);
/* Makes a generation in which version() returns another number. */
long generation_of(int number);
/* Returns the end of the 2 MiB that the code's last page is in, and of the program before it. */
char *next_to_code(size_t length);

#endif
