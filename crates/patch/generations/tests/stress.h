/* SPDX-License-Identifier: GPL-2.0 */
#ifndef STRESS_H
#define STRESS_H

#include <stdbool.h>
#include <stddef.h>

/* Duration of each of the stress tests, in seconds. */
extern double stress_s;

void fill(char *at, size_t length, unsigned int seed);
bool holds(const char *at, size_t length, unsigned int seed);

#endif
