/* Sixteen threads hammer functions that a test patches and reverts; others guard registers, or stand in a read.
 *
 *   victim CONTROL [hammering threads [microseconds of rest between rounds]]
 */
#include "control.h"

#include <pthread.h>
#include <signal.h>
#include <xmmintrin.h>

#define VERSION 1

PATCHED long leaf(long x) { return x * 48 + VERSION; }

/* A chain: what one call of `outer` returns must come from one version. */
PATCHED long inner(long x) { return (x & 1) << 8 | VERSION; }
PATCHED long mid(long x) { return inner(x) << 8 | VERSION; }
PATCHED long outer(long x) { return mid(x) << 8 | VERSION; }

PATCHED long recurse(long depth) {
    long below = depth ? recurse(depth - 1) : 0;
    __asm__ volatile("" : "+r"(below)); /* a call, not a loop */
    return below + VERSION;
}

PATCHED long by_pointer(long x) { return (x ^ 0x55) * 16 + VERSION; }

/* The address of a patched function stays the one that the program has always seen. */
PATCHED long address_of(void) {
    long address = (long)by_pointer;
    __asm__ volatile("" : "+r"(address));
    return address * 16 + VERSION;
}

PATCHED long tail_last(long x) { return x << 4 | VERSION; }
PATCHED long tail_first(long x) { return tail_last(x << 4 | VERSION); }

/* Every callee-saved register is pushed: boundaries of instructions inside the first five bytes. */
PATCHED long pushes(long a, long b, long c, long d, long e, long f) {
    long one = leaf(a), two = leaf(b + one), three = leaf(c + two), four = leaf(d + three);
    return (leaf(e + four) - leaf(f + three) + one + two + three + four) * 16 + VERSION;
}

struct large {
    long a, b, c, d;
};

PATCHED struct large by_hidden_pointer(long x) { return (struct large){x, x + 1, x + 2, VERSION}; }

PATCHED long variadic(int count, ...) {
    va_list list;
    va_start(list, count);
    double sum = 0;
    for (int i = 0; i < count; i++) sum += i & 1 ? va_arg(list, double) : (double)va_arg(list, long);
    va_end(list);
    return (long)sum * 16 + VERSION;
}

PATCHED double floats(double a, float b, double c, double d, double e, double f, double g, double h, double on_stack) {
    return (a + b + c + d + e + f + g + h + on_stack) * 16 + VERSION;
}

PATCHED long double extended(long double x) { return x * 16 + VERSION; }

PATCHED long many(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j) {
    return (a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j) * 16 + VERSION;
}

static __thread long per_thread;
static long counted;

PATCHED long thread_local_state(long x) {
    per_thread += x;
    return per_thread * 16 + VERSION;
}

/* A static of the function keeps its place and its value. */
PATCHED long static_state(void) {
    static long calls;
    __atomic_fetch_add(&counted, 1, __ATOMIC_SEQ_CST);
    long now = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    return (now > 0) * 16 + VERSION;
}

/* In the patch, but never called: a test writes over it. */
PATCHED long never_called(long x) { return x * 80 + VERSION; }

/* Imports, through the PLT or the GOT. */
PATCHED long imports(const char *text) {
    char copy[32];
    snprintf(copy, sizeof copy, "%s%d", text, VERSION);
    return (long)strlen(copy) * 16 + VERSION;
}

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static long (*volatile pointer)(long) = by_pointer;

static void one_round(struct observer *o, long n) {
    long (*volatile call)(long) = leaf;
    uint64_t p = phase_now();
    for (int i = 0; i < 32; i++, p = phase_now()) answer(o, p, call(n + i), (n + i) * 3, "leaf");

    p = phase_now();
    long chain = outer(n);
    if ((chain & 255) != (chain >> 8 & 255) || (chain & 255) != (chain >> 16 & 255) || chain >> 24 != (n & 1))
        violation("chain: %#lx is of more than one version", chain);
    observe(o, p, chain & 255, "chain");

    p = phase_now();
    long sum = recurse(9);
    if (sum % 10) violation("recurse: %ld is of more than one version", sum);
    observe(o, p, (int)(sum / 10), "recurse");

    p = phase_now(), answer(o, p, pointer(n), n ^ 0x55, "by_pointer");
    p = phase_now();
    long address = address_of();
    if (address >> 4 != (long)by_pointer) violation("address_of: %#lx", address);
    observe(o, p, address & 15, "address_of");

    p = phase_now();
    long tail = tail_first(n & 0xfff);
    if (tail >> 8 != (n & 0xfff)) violation("tail: %#lx", tail);
    observe(o, p, tail >> 4 & 15, "tail_first");
    observe(o, p, tail & 15, "tail_last");

    p = phase_now();
    long pushed = pushes(1, 2, 3, 4, 5, 6);
    observe(o, p, pushed & 15, "pushes");

    p = phase_now();
    struct large l = by_hidden_pointer(n);
    if (l.a != n || l.b != n + 1 || l.c != n + 2) violation("by_hidden_pointer");
    observe(o, p, (int)l.d, "by_hidden_pointer");

    p = phase_now(), answer(o, p, variadic(5, 1L, 2.0, 3L, 4.0, 5L), 15, "variadic");
    p = phase_now(), answer(o, p, (long)floats(1, 2, 3, 4, 5, 6, 7, 8, 9), 45, "floats");
    p = phase_now(), answer(o, p, (long)extended(n & 0xffff), n & 0xffff, "extended");
    p = phase_now(), answer(o, p, many(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 385, "many");
    long mine = per_thread;
    p = phase_now(), answer(o, p, thread_local_state(3), mine + 3, "thread_local_state");
    p = phase_now(), answer(o, p, static_state(), 1, "static_state");
    p = phase_now(), answer(o, p, imports("twelve chars"), 13, "imports");
}

static useconds_t rest;

static void *hammer(void *arg) {
    struct observer o = observer_new(arg);
    for (long n = 0; !stopping(); n++) {
        errno = 4711;
        one_round(&o, n & 0xffffff);
        if (errno != 4711) violation("errno became %d", errno);
        if (rest) usleep(rest);
    }
    return NULL;
}

/* Fills the general and the vector registers, sets the flags and then lets time pass without touching any of them.
 * Returns the number of registers that changed, plus one when the flags did. */
long guard_registers(long spins);
__asm__(".text\n"
        ".p2align 4\n"
        ".type guard_registers, @function\n"
        "guard_registers:\n"
        "  .cfi_startproc\n"
        "  push %rbx\n  .cfi_adjust_cfa_offset 8\n"
        "  push %rbp\n  .cfi_adjust_cfa_offset 8\n"
        "  push %r12\n  .cfi_adjust_cfa_offset 8\n"
        "  push %r13\n  .cfi_adjust_cfa_offset 8\n"
        "  push %r14\n  .cfi_adjust_cfa_offset 8\n"
        "  push %r15\n  .cfi_adjust_cfa_offset 8\n"
        "  mov %rdi, %rcx\n"
        "  .irp r, rax, rbx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15\n"
        "  movabs $0x5a5a0000c3c30000 + (. - guard_registers), %\\r\n"
        "  .endr\n"
        "  movq %rax, %xmm0\n  movq %rbx, %xmm1\n  movq %rdx, %xmm2\n  movq %rsi, %xmm3\n  movq %rdi, %xmm4\n"
        "  movq %rbp, %xmm5\n  movq %r8, %xmm6\n  movq %r9, %xmm7\n  movq %r10, %xmm8\n  movq %r11, %xmm9\n"
        "  movq %r12, %xmm10\n  movq %r13, %xmm11\n  movq %r14, %xmm12\n  movq %r15, %xmm13\n"
        "  movq %rax, %xmm14\n  movq %rbx, %xmm15\n"
        /* The red zone belongs to this function as well. */
        "  mov %rax, -64(%rsp)\n  mov %rbx, -8(%rsp)\n"
        "  cmp %rax, %rax\n  stc\n"
        "1: jrcxz 2f\n"
        "  lea -1(%rcx), %rcx\n"
        "  jmp 1b\n"
        /* The flags first, before a comparison changes them: carry, parity and zero are set. */
        "2: mov %rax, -16(%rsp)\n  mov %rbx, -24(%rsp)\n"
        "  lahf\n  movzbl %ah, %ecx\n  cmp $0x47, %ecx\n  setne %cl\n  movzbl %cl, %ecx\n"
        "  mov -16(%rsp), %rax\n"
        "  cmp %rax, -64(%rsp)\n  je 3f\n  inc %rcx\n"
        "3: cmp %rbx, -8(%rsp)\n  je 3f\n  inc %rcx\n"
        "3:\n"
        "  .macro same x, r\n"
        "  movq \\x, %rax\n  cmp %rax, \\r\n  je 4f\n  inc %rcx\n4:\n"
        "  .endm\n"
        "  same %xmm0, -16(%rsp)\n  same %xmm1, %rbx\n  same %xmm2, %rdx\n  same %xmm3, %rsi\n  same %xmm4, %rdi\n"
        "  same %xmm5, %rbp\n  same %xmm6, %r8\n  same %xmm7, %r9\n  same %xmm8, %r10\n  same %xmm9, %r11\n"
        "  same %xmm10, %r12\n  same %xmm11, %r13\n  same %xmm12, %r14\n  same %xmm13, %r15\n"
        "  same %xmm14, -16(%rsp)\n  same %xmm15, -24(%rsp)\n"
        /* Registers and vectors could have changed alike: look at the constants once more. */
        "  .macro constant r, n\n"
        "  movabs $0x5a5a0000c3c30000 + (.Lfirst - guard_registers) + \\n * 10, %rax\n  cmp %rax, \\r\n  je 5f\n  inc %rcx\n5:\n"
        "  .endm\n"
        "  .set .Lfirst, guard_registers + 13\n"
        "  constant -16(%rsp), 0\n  constant %rbx, 1\n  constant %rdx, 2\n  constant %rsi, 3\n  constant %rdi, 4\n"
        "  constant %rbp, 5\n  constant %r8, 6\n  constant %r9, 7\n  constant %r10, 8\n  constant %r11, 9\n"
        "  constant %r12, 10\n  constant %r13, 11\n  constant %r14, 12\n  constant %r15, 13\n"
        "  mov %rcx, %rax\n"
        "  pop %r15\n  .cfi_adjust_cfa_offset -8\n"
        "  pop %r14\n  .cfi_adjust_cfa_offset -8\n"
        "  pop %r13\n  .cfi_adjust_cfa_offset -8\n"
        "  pop %r12\n  .cfi_adjust_cfa_offset -8\n"
        "  pop %rbp\n  .cfi_adjust_cfa_offset -8\n"
        "  pop %rbx\n  .cfi_adjust_cfa_offset -8\n"
        "  ret\n"
        "  .cfi_endproc\n"
        "  .size guard_registers, . - guard_registers\n");

/* Is stopped at any instruction, and made to run system calls for the tool: nothing of that may show. */
static void *guard(void *arg) {
    struct observer o = observer_new(arg);
    sigset_t before, now;
    _MM_SET_ROUNDING_MODE(_MM_ROUND_DOWN);
    pthread_sigmask(SIG_BLOCK, &(sigset_t){{1UL << (SIGUSR2 - 1)}}, NULL);
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    while (!stopping()) {
        long wrong = guard_registers(20000);
        if (wrong) violation("%ld registers changed by themselves", wrong);
        if (_MM_GET_ROUNDING_MODE() != _MM_ROUND_DOWN) violation("the rounding mode changed by itself");
        pthread_sigmask(SIG_BLOCK, NULL, &now);
        if (memcmp(&before, &now, 8)) violation("the signal mask changed by itself");
        uint64_t p = phase_now();
        answer(&o, p, leaf(1), 3, "leaf");
        if (rest) usleep(rest);
    }
    return NULL;
}

/* Stands in a read for ever; being probed there must not show. */
static void *blocked(void *arg) {
    int fds[2];
    char byte;
    if (pipe2(fds, O_CLOEXEC)) violation("pipe: %m");
    struct observer o = observer_new(arg);
    uint64_t p = phase_now();
    answer(&o, p, leaf(1), 3, "leaf");
    ssize_t got = read(fds[0], &byte, 1);
    violation("a read without an answer returned %zd (%m)", got);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    int hammers = argc > 2 ? atoi(argv[2]) : 16;
    rest = argc > 3 ? (useconds_t)atoi(argv[3]) : 0;
    pthread_t thread;
    for (int i = 0; i < hammers; i++) pthread_create(&thread, NULL, hammer, "hammer");
    for (int i = 0; i < 2; i++) pthread_create(&thread, NULL, guard, "guard");
    for (int i = 0; i < 4; i++) pthread_create(&thread, NULL, blocked, "blocked");
    struct observer o = observer_new("main");
    await_slots((uint32_t)hammers + 7);
    for (long n = 0; !stopping(); n++) {
        uint64_t p = phase_now();
        answer(&o, p, leaf(n), n * 3, "leaf");
        usleep(1000);
    }
    return atomic_load(&control->violations) != 0;
}
