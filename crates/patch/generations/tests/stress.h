/* SPDX-License-Identifier: GPL-2.0 */
#ifndef STRESS_H
#define STRESS_H

#include <stdbool.h>
#include <stddef.h>

/* How long each of the stress tests goes on. */
extern double stress_s;

void fill(char *at, size_t length, unsigned int seed);
bool holds(const char *at, size_t length, unsigned int seed);

#endif
