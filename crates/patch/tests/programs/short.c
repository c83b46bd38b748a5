/* Functions that leave no room for a jump of five bytes. Either the callers are patched, or the patch is refused and
 * the message names the function; both are right, a jump over a neighbour is not. One case per build, compiled with
 * -fno-align-functions so that no padding helps:
 *
 *   -DONE_BYTE      ret
 *   -DTHREE_BYTES   xor %eax, %eax; ret
 *   -DFOUR_BYTES    mov %rdi, %rax; ret
 *   -DJUMP_INSIDE   long enough, but code behind the first five bytes jumps to the second
 *   -DLOOP_INSIDE   the same, from within the first five bytes
 *   -DPAGE_CROSSING long enough, but its first bytes lie in two pages
 *
 *   short CONTROL
 */
#include "control.h"

#include <pthread.h>

#define VERSION 1

/* -DSTATIC: all callers are known, and can be patched in its place. */
#ifdef STATIC
#define LINKAGE static
#else
#define LINKAGE
#endif

#if defined ONE_BYTE
static __thread volatile long state;
PATCHED LINKAGE void short_function(void) {
    if (VERSION != 1) state = VERSION;
}
__attribute__((noinline)) static long call(void) {
    state = 1;
    short_function();
    return state;
}
#elif defined THREE_BYTES
PATCHED LINKAGE long short_function(void) { return VERSION - 1; }
__attribute__((noinline)) static long call(void) { return short_function() + 1; }
#elif defined FOUR_BYTES
PATCHED LINKAGE long short_function(long x) { return x + VERSION - 1; }
__attribute__((noinline)) static long call(void) { return short_function(1); }
#elif defined JUMP_INSIDE
__attribute__((naked, noipa)) LINKAGE long short_function(long x) {
    __asm__("push %rbx\n 1: dec %edi\n mov $" STRING(VERSION) ", %eax\n nop\n nop\n jnz 1b\n pop %rbx\n ret");
}
__attribute__((noinline)) static long call(void) { return short_function(3); }
#elif defined LOOP_INSIDE
__attribute__((naked, noipa)) LINKAGE long short_function(long x) {
    __asm__("mov %edi, %ecx\n 1: loop 1b\n mov $" STRING(VERSION) ", %eax\n ret");
}
__attribute__((noinline)) static long call(void) { return short_function(3); }
#elif defined PAGE_CROSSING
/* The compiler adds an instruction of two bytes: two bytes are left of the page. */
__attribute__((naked, aligned(4096), noipa, used)) void fills_a_page(void) { __asm__(".skip 4092, 0x90"); }
PATCHED LINKAGE long short_function(long x) { return x * 10 + VERSION; }
__attribute__((noinline)) static long call(void) { return short_function(0); }
#endif
/* What a jump that is too long for its function hits. */
PATCHED long neighbour(long x) { return x ^ 77; }

static void *hammer(void *arg) {
    struct observer o = observer_new(arg);
    while (!stopping()) {
        for (int i = 0; i < 1000; i++) {
            uint64_t p = phase_now();
            observe(&o, p, (int)call(), "short_function");
            if (neighbour(0) != 77) violation("the neighbour of a short function was hit");
        }
        usleep(500);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    pthread_t thread;
    for (int i = 0; i < 4; i++) pthread_create(&thread, NULL, hammer, "hammer");
    await_slots(4);
    while (!stopping()) usleep(1000);
    return atomic_load(&control->violations) != 0;
}
