/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * point.c - cost of a quiescence point without a request, compared with an empty loop and a relaxed atomic load
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "stillpoint.h"

#define ROUNDS 21
#define CALLS 20000000u

static uint32_t rival;

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

#define MEASURE(name, work)                                                                                            \
    do {                                                                                                               \
        double each[ROUNDS];                                                                                           \
        for (int round = 0; round < ROUNDS; round++) {                                                                 \
            double start = now_ns();                                                                                   \
            for (unsigned i = 0; i < CALLS; i++) {                                                                     \
                work;                                                                                                  \
                __asm__ volatile("" ::: "memory");                                                                     \
            }                                                                                                          \
            each[round] = (now_ns() - start) / CALLS;                                                                  \
        }                                                                                                              \
        qsort(each, ROUNDS, sizeof *each, ascending);                                                                  \
        printf("%-28s median %.3f ns, max %.3f ns (%d runs of %u)\n", name, each[ROUNDS / 2], each[ROUNDS - 1],        \
               ROUNDS, CALLS);                                                                                         \
    } while (0)

int main(void)
{
    struct sp_config config = {.size = sizeof config};
    if (sp_init(&config) || sp_thread_birth("bench"))
        return 1;
    MEASURE("empty loop", (void)0);
    MEASURE("relaxed load and branch", if (__atomic_load_n(&rival, __ATOMIC_RELAXED)) abort());
    MEASURE("sp_quiescence_point", sp_quiescence_point());
    MEASURE("sp_park_begin + sp_park_end", (sp_park_begin(), sp_park_end()));
    return 0;
}
