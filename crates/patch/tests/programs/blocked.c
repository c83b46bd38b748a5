/* A thread that stands inside a function that is being patched, and a contract between two patched functions.
 *
 *   blocked CONTROL [--contract]
 *
 * The thread `sleeper` reads standard input byte by byte: one in `stands_here`, the next one outside of it.
 */
#include "control.h"

#include <pthread.h>

#define VERSION 1

PATCHED long leaf(long x) { return x * 48 + VERSION; }

/* Keeps its old code for as long as it stands in the read. */
PATCHED long stands_here(int fd) {
    char byte = 0;
    ssize_t got = read(fd, &byte, 1);
    return got * 16 + VERSION;
}

/* Two functions that rely on each other: what `begin_deal` writes, `end_deal` of the same version reads. */
PATCHED long begin_deal(long value) { return value * (VERSION + 10); }
PATCHED long end_deal(long deal) {
    return deal / (VERSION + 10) * 16 + (deal % (VERSION + 10) ? 0 : VERSION);
}

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

/* Not changed itself; a patch that changes the deal states that this function must be off the stack. */
__attribute__((noinline)) static long transaction(long value) {
    long deal = begin_deal(value);
    for (int i = 0; i < 20; i++) sched_yield();
    return end_deal(deal);
}

static void *dealer(void *arg) {
    struct observer o = observer_new(arg);
    for (long n = 1; !stopping(); n = n * 3 % 1000003) {
        uint64_t p = phase_now();
        answer(&o, p, transaction(n), n, "transaction");
        for (int i = 0; i < 20; i++) sched_yield();
    }
    return NULL;
}

static void *hammer(void *arg) {
    struct observer o = observer_new(arg);
    for (long n = 0; !stopping(); n++) {
        uint64_t p = phase_now();
        answer(&o, p, leaf(n), n * 3, "leaf");
        usleep(100);
    }
    return NULL;
}

static void *sleeper(void *arg) {
    struct observer o = observer_new(arg);
    char byte;
    do {
        uint64_t p = phase_now();
        long got = stands_here(0);
        if (got >> 4 != 1) return NULL;
        observe(&o, p, got & 15, "stands_here");
    } while (read(0, &byte, 1) == 1);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    int contract = argc > 2 && strcmp(argv[2], "--contract") == 0;
    pthread_t thread;
    for (int i = 0; i < 4; i++) pthread_create(&thread, NULL, contract ? dealer : hammer, contract ? "dealer" : "hammer");
    if (!contract) pthread_create(&thread, NULL, sleeper, "sleeper");
    await_slots(contract ? 4 : 5);
    while (!stopping()) usleep(1000);
    return atomic_load(&control->violations) != 0;
}
