/* The page that a victim shares with the test that patches it.
 *
 * The test announces in `phase` what may happen: which version is left, which one is entered, and whether the way back
 * is allowed too. A victim's thread reads the phase before and after each call of a patched function; when it has not
 * changed meanwhile, the version that answered must be one that the phase allows, in an order that it allows.
 *
 *   phase = epoch << 32 | flags << 16 | to << 8 | from
 *
 *   from == to            settled: only this version answers
 *   from != to            a thread goes over once, and never back
 *   from != to, BACK      a thread may go over, and back once (an abort)
 *   from != to, FREE      either may answer (several transitions while the test is not looking)
 */
#ifndef CONTROL_H
#define CONTROL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SLOTS 256
#define BACK 1
#define FREE 2

/* A function that is patched: not inlined, not cloned, and its callers assume nothing about it but the ABI. */
#define PATCHED __attribute__((noipa))
#define STRING_(x) #x
#define STRING(x) STRING_(x)

struct slot {
    _Atomic(uint64_t) calls;
    _Atomic(uint32_t) version;
    _Atomic(int32_t) tid;
    char role[48];
};

struct control {
    _Atomic(uint64_t) phase;
    _Atomic(uint64_t) violations;
    _Atomic(uint32_t) slots_used;
    _Atomic(uint32_t) stop;
    _Atomic(uint32_t) command; /* what a victim does on demand, see there */
    _Atomic(uint32_t) ready;   /* all threads have begun */
    char message[224];
    struct slot slots[SLOTS];
};

static struct control *control;
static uint32_t slots_before;

/* One thread's view. */
struct observer {
    uint64_t phase;
    int version, changes;
    struct slot *slot;
};

__attribute__((unused, noinline, format(printf, 1, 2))) static void violation(const char *format, ...) {
    char text[sizeof control->message];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (atomic_fetch_add(&control->violations, 1) == 0) memcpy(control->message, text, sizeof text);
}

__attribute__((unused)) static void control_open(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        perror(path);
        exit(2);
    }
    control = (struct control *)mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (control == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    slots_before = atomic_load(&control->slots_used);
}

/* Until `count` slots have been taken: the test begins when this returns. */
__attribute__((unused)) static void await_slots(uint32_t count) {
    while (atomic_load(&control->slots_used) < slots_before + count) usleep(100);
    atomic_store(&control->ready, 1);
}

/* Takes a slot. When all are used (a storm of short threads), the last one is shared. */
__attribute__((unused)) static struct observer observer_new(const char *role) {
    uint32_t i = atomic_fetch_add(&control->slots_used, 1);
    if (i >= SLOTS) {
        atomic_store(&control->slots_used, SLOTS);
        i = SLOTS - 1;
    }
    struct slot *slot = &control->slots[i];
    atomic_store(&slot->tid, (int32_t)syscall(SYS_gettid));
    strncpy(slot->role, role, sizeof slot->role - 1);
    return (struct observer){.slot = slot};
}

static inline uint64_t phase_now(void) { return atomic_load(&control->phase); }

__attribute__((noinline)) static void judge(struct observer *o, uint64_t phase, int version, const char *what) {
    int from = phase & 255, to = phase >> 8 & 255, flags = phase >> 16 & 255;
    if (version != from && version != to) {
        violation("%s: version %d answered, allowed are %d and %d", what, version, from, to);
    } else if (o->phase == phase && version != o->version && !(flags & FREE)) {
        o->changes++;
        if (o->changes > (flags & BACK ? 2 : 1))
            violation("%s: version %d after %d, change %d (%d to %d)", what, version, o->version, o->changes, from, to);
    }
    if (o->phase != phase) {
        o->phase = phase;
        /* The first call of a phase that already answers with the new version has used the change up. */
        o->changes = version == to && from != to && !(flags & FREE);
    }
    o->version = version;
}

/* `version` answered to a call that began at `before`. */
__attribute__((unused)) static inline void observe(struct observer *o, uint64_t before, int version, const char *what) {
    if (phase_now() == before && (before != o->phase || version != o->version || (before & 255) == (before >> 8 & 255)))
        judge(o, before, version, what);
    else if (phase_now() != before)
        o->phase = 0;
    atomic_store_explicit(&o->slot->version, version, memory_order_relaxed);
    atomic_store_explicit(&o->slot->calls, atomic_load_explicit(&o->slot->calls, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

/* Patched functions answer `value * 16 + version`. */
__attribute__((unused)) static inline void answer(struct observer *o, uint64_t before, long got, long value,
                                                   const char *what) {
    if (got >> 4 != value) violation("%s: answered %#lx, value %ld expected", what, got, value);
    observe(o, before, got & 15, what);
}

static inline int stopping(void) { return atomic_load_explicit(&control->stop, memory_order_relaxed); }

#endif
