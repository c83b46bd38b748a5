/* Coroutines: stacks that no thread stands on keep frames of functions that a patch changes. A tool that looks at the
 * threads' stacks cannot see them, and has to search the memory.
 *
 *   coroutine CONTROL [MIB]        holds this much memory besides
 */
#include "control.h"

#include <ucontext.h>

#define VERSION 1

static ucontext_t scheduler, routine;

/* Suspended in the middle of its old code. */
PATCHED long suspends(void) {
    long before = VERSION;
    __asm__ volatile("" : "+r"(before));
    swapcontext(&routine, &scheduler);
    return before << 4 | VERSION;
}

static void body(void) {
    struct observer o = observer_new("coroutine");
    for (;;) {
        uint64_t p = phase_now();
        long both = suspends();
        if ((both & 15) != both >> 4) violation("suspends: %#lx is of more than one version", both);
        observe(&o, p, both & 15, "suspends");
    }
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    if (argc > 2) {
        size_t held = strtoul(argv[2], NULL, 10) << 20;
        memset(malloc(held), 1, held);
    }
    size_t size = 256 * 1024;
    getcontext(&routine);
    routine.uc_stack.ss_sp = malloc(size);
    routine.uc_stack.ss_size = size;
    makecontext(&routine, body, 0);
    while (!stopping()) {
        swapcontext(&scheduler, &routine);
        await_slots(1);
        usleep(1000);
    }
    return atomic_load(&control->violations) != 0;
}
