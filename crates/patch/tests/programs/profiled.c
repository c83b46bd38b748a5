/* A profiler's signal looks back from wherever it finds a thread: in old code and new, in dispatchers, in displaced
 * prologues. Every look must reach the thread's beginning.
 *
 *   profiled CONTROL
 *
 * One thread stays in a patched function until it is commanded to leave, so that a transition lasts.
 */
#include "control.h"

#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#define VERSION 1

PATCHED long leaf(long x) { return x * 16 + VERSION; }

/* Registers that are kept, and locals: each instruction of the prologue moves the stack pointer. */
PATCHED long pushes(long a, long b, long c, long d, long e, long f) {
    long one = leaf(a), two = leaf(b + one), three = leaf(c + two), four = leaf(d + three);
    return (leaf(e + four) - leaf(f + three) + one + two + three + four) * 16 + VERSION;
}

PATCHED long locals(long x) {
    char room[3000];
    __asm__ volatile("" : : "r"(room) : "memory");
    room[x & 1023] = (char)x;
    __asm__ volatile("" : : "r"(room) : "memory");
    return room[x & 1023] * 16 + VERSION;
}

PATCHED long calls_first(void) {
    long pid = getppid();
    __asm__ volatile("" : "+r"(pid));
    return (pid > 0) * 16 + VERSION;
}

PATCHED long stays(long x) {
    while (!atomic_load(&control->command) && !stopping()) usleep(1000);
    return x * 16 + VERSION;
}

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

extern char __executable_start[];
static __thread void *beginning;
static struct slot *looks, *within;

/* A patch lies below the program, as near as there is room. */
static int in_a_patch(void *address) {
    uintptr_t at = (uintptr_t)address, start = (uintptr_t)__executable_start;
    return at < start && at > start - (1ul << 31);
}

static void look(int signal) {
    (void)signal;
    int saved = errno;
    void *frames[64];
    int count = backtrace(frames, 64);
    if (beginning) {
        int found = 0;
        for (int i = 0; i < count; i++) found |= frames[i] == beginning;
        if (!found)
            violation("a look from %p ends after %d frames at %p", count > 2 ? frames[2] : NULL, count,
                      count ? frames[count - 1] : NULL);
        atomic_fetch_add(&looks->calls, 1);
        /* the handler, the signal's return, where it was */
        if (count > 2 && in_a_patch(frames[2])) atomic_fetch_add(&within->calls, 1);
    }
    errno = saved;
}

static void *hammers(void *argument) {
    struct observer o = observer_new("hammer");
    beginning = __builtin_return_address(0);
    for (long n = (long)argument; !stopping(); n++) {
        uint64_t p = phase_now();
        answer(&o, p, leaf(n), n, "leaf");
        p = phase_now();
        observe(&o, p, pushes(n, 1, 2, 3, 4, 5) & 15, "pushes");
        p = phase_now();
        answer(&o, p, locals(n), (char)n, "locals");
        p = phase_now();
        answer(&o, p, calls_first(), 1, "calls_first");
    }
    return NULL;
}

static void *blocked(void *argument) {
    observer_new("blocked");
    beginning = __builtin_return_address(0);
    while (!stopping()) {
        if (atomic_load(&control->command)) {
            usleep(1000);
            continue;
        }
        stays((long)argument);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    looks = observer_new("sleeper").slot;
    within = observer_new("sleeper").slot;
    /* The unwinder is loaded here, not in a handler. */
    void *frame;
    backtrace(&frame, 1);
    struct sigaction action = {.sa_handler = look, .sa_flags = SA_RESTART};
    sigaction(SIGPROF, &action, NULL);
    pthread_t thread;
    for (long i = 0; i < 3; i++)
        if (pthread_create(&thread, NULL, hammers, (void *)i)) return 1;
    if (pthread_create(&thread, NULL, blocked, NULL)) return 1;
    await_slots(6);
    struct itimerval every = {{0, 1000}, {0, 1000}};
    setitimer(ITIMER_PROF, &every, NULL);
    while (!stopping()) usleep(1000);
    _exit(0);
}
