/* What the benchmark patches: threads that run or sleep, and functions whose calls are timed.
 *
 *   bench threads RUNNING SLEEPING    prints "ready" when all of them have started
 *   bench cost                        for each line of input, prints nanoseconds per call: one function, 64 functions
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define VERSION 1
#define PATCHED __attribute__((noipa))

PATCHED long leaf(long x) { return x * 48 + VERSION; }

#define FUNCTION(n) PATCHED long function_##n(long x) { return x * (n + 3) + VERSION; }
#define EIGHT(n) FUNCTION(n##0) FUNCTION(n##1) FUNCTION(n##2) FUNCTION(n##3) \
                 FUNCTION(n##4) FUNCTION(n##5) FUNCTION(n##6) FUNCTION(n##7)
EIGHT(1) EIGHT(2) EIGHT(3) EIGHT(4) EIGHT(5) EIGHT(6) EIGHT(7) EIGHT(8)

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

#define NAME(n) function_##n
#define EIGHT_NAMES(n) NAME(n##0), NAME(n##1), NAME(n##2), NAME(n##3), NAME(n##4), NAME(n##5), NAME(n##6), NAME(n##7)
static long (*const functions[])(long) = {EIGHT_NAMES(1), EIGHT_NAMES(2), EIGHT_NAMES(3), EIGHT_NAMES(4),
                                          EIGHT_NAMES(5), EIGHT_NAMES(6), EIGHT_NAMES(7), EIGHT_NAMES(8)};
#define FUNCTIONS (sizeof functions / sizeof *functions)

static atomic_int started;
static int never_written[2];

static void *running(void *unused) {
    (void)unused;
    atomic_fetch_add(&started, 1);
    for (volatile long x = 0;; x = leaf(x))
        ;
    return NULL;
}

static void *sleeping(void *unused) {
    (void)unused;
    char byte;
    atomic_fetch_add(&started, 1);
    while (read(never_written[0], &byte, 1) != 0)
        ;
    return NULL;
}

static void start(void *(*body)(void *), int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 64 << 10);
    for (int i = 0; i < count; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, body, NULL) != 0) {
            perror("pthread_create");
            exit(2);
        }
    }
    pthread_attr_destroy(&attributes);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

/* The calls of a round depend on each other, so that they do not overlap in the processor. */
static double cost_of_one(void) {
    const long calls = 20000000;
    long x = 1;
    double from = now();
    for (long i = 0; i < calls; i++) x = leaf(x);
    double to = now();
    __asm__ volatile("" : : "r"(x));
    return (to - from) / calls;
}

static double cost_of_many(void) {
    const long rounds = 300000;
    long x = 1;
    double from = now();
    for (long i = 0; i < rounds; i++)
        for (size_t f = 0; f < FUNCTIONS; f++) x = functions[f](x);
    double to = now();
    __asm__ volatile("" : : "r"(x));
    return (to - from) / (rounds * (long)FUNCTIONS);
}

int main(int argc, char **argv) {
    char line[16];
    if (argc == 4 && strcmp(argv[1], "threads") == 0) {
        int runners = atoi(argv[2]), sleepers = atoi(argv[3]);
        if (pipe(never_written) != 0) return 2;
        start(running, runners);
        start(sleeping, sleepers);
        while (atomic_load(&started) < runners + sleepers) usleep(1000);
        puts("ready");
        fflush(stdout);
        while (fgets(line, sizeof line, stdin) != NULL)
            ;
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "cost") == 0) {
        while (fgets(line, sizeof line, stdin) != NULL) {
            double one = cost_of_one(), many = cost_of_many();
            printf("%.4f %.4f\n", one, many);
            fflush(stdout);
        }
        return 0;
    }
    fputs("usage: bench threads RUNNING SLEEPING | bench cost\n", stderr);
    return 2;
}
