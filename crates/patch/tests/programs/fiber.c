/* A coroutine that the program switches to by its own assembler, as libraries for coroutines do: nothing that it imports
 * tells of it. It is suspended in the middle of its old code.
 *
 *   fiber CONTROL        leaves it on command, and is suspended elsewhere from then on
 */
#include "control.h"

#define VERSION 1

/* switch_to(&save, &load) */
void switch_to(void **save, void **load);
__asm__(".text\n.globl switch_to\n.type switch_to, @function\nswitch_to:\n"
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov (%rsi), %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
        ".size switch_to, . - switch_to\n");

static void *scheduler, *routine;

PATCHED long suspends(void) {
    long before = VERSION;
    __asm__ volatile("" : "+r"(before));
    switch_to(&routine, &scheduler);
    return before << 4 | VERSION;
}

/* Of the same form: what the other one left on the stack is overwritten. */
PATCHED long elsewhere(void) {
    long before = 1;
    __asm__ volatile("" : "+r"(before));
    switch_to(&routine, &scheduler);
    return before;
}

PATCHED long plain(void) { return VERSION; }

static void body(void) {
    for (;;) {
        long both = suspends();
        if ((both & 15) != both >> 4) violation("suspends: %#lx is of more than one version", both);
        for (;;) elsewhere();
    }
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    size_t size = 256 * 1024;
    void **top = (void **)((char *)malloc(size) + size);
    /* six registers, and where to go on; aligned as behind a call */
    top -= 10;
    top[6] = (void *)body;
    routine = top;
    switch_to(&scheduler, &routine);
    struct observer o = observer_new("main");
    await_slots(1);
    while (!stopping()) {
        uint64_t p = phase_now();
        observe(&o, p, (int)plain(), "plain");
        if (atomic_load(&control->command)) switch_to(&scheduler, &routine);
        usleep(1000);
    }
    return atomic_load(&control->violations) != 0;
}
