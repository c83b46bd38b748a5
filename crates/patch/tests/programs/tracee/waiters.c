// Threads that wait in several system calls and threads that compute. Each checks what it gets back; "report" on
// standard input prints the faults seen so far, end of input ends the program.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum kind { EPOLL, READ, SLEEP, FUTEX, COMPUTE, KINDS };
static volatile long done[KINDS], faults, interrupted;
static volatile int hook_calls;

static void fault(const char *what, long result)
{
    __atomic_add_fetch(&faults, 1, __ATOMIC_RELAXED);
    fprintf(stderr, "fault: %s returned %ld, errno %d\n", what, result, errno);
}

static void went_round(enum kind kind) { __atomic_add_fetch(&done[kind], 1, __ATOMIC_RELAXED); }

// long spin(const void *in, void *out, long count): fills every register but the stack pointer from constants and
// `in`, and the red zone, spins, compares the constants and stores the rest to `out`. Returns 0 if all was kept.
#define GENERAL "rax,rbx,rdx,rsi,rdi,rbp,r8,r9,r10,r11,r12,r13,r14,r15"
#define SPIN(name, move, vector, count, size)                                                                          \
    asm(".globl " name "\n" name ":\n"                                                                                 \
        ".irp r, rbx,rbp,r12,r13,r14,r15,rsi\n push %\\r\n .endr\n"                                                    \
        ".altmacro\n"                                                                                                  \
        ".macro " name "_load n\n " move " \\n*" size "(%rdi), %" vector "\\n\n .endm\n"                               \
        ".macro " name "_store n\n " move " %" vector "\\n, \\n*" size "(%rsi)\n .endm\n"                              \
        ".set i, 0\n .rept " count "\n " name "_load %i\n .set i, i+1\n .endr\n"                                       \
        "mov %rdx, %rcx\n"                                                                                             \
        ".irp r, " GENERAL "\n mov $0x5a5a1234, %\\r\n .endr\n"                                                        \
        ".set i, -128\n .rept 16\n movq $0x1234567, i(%rsp)\n .set i, i+8\n .endr\n"                                   \
        "1: dec %rcx\n jnz 1b\n"                                                                                       \
        ".irp r, " GENERAL "\n cmp $0x5a5a1234, %\\r\n jne 2f\n .endr\n"                                               \
        ".set i, -128\n .rept 16\n cmpq $0x1234567, i(%rsp)\n jne 2f\n .set i, i+8\n .endr\n"                          \
        "mov (%rsp), %rsi\n"                                                                                           \
        ".set i, 0\n .rept " count "\n " name "_store %i\n .set i, i+1\n .endr\n"                                      \
        ".noaltmacro\n"                                                                                                \
        "xor %eax, %eax\n jmp 3f\n2: mov $1, %eax\n"                                                                   \
        "3: .irp r, rsi,r15,r14,r13,r12,rbp,rbx\n pop %\\r\n .endr\n ret\n")
SPIN("spin_sse", "movdqu", "xmm", "16", "16");
SPIN("spin_avx", "vmovdqu", "ymm", "16", "32");
SPIN("spin_avx512", "vmovdqu64", "zmm", "32", "64");
long spin_sse(const void *, void *, long), spin_avx(const void *, void *, long), spin_avx512(const void *, void *, long);

static void *compute(void *arg)
{
    (void)arg;
    uint8_t in[2048], out[2048];
    size_t used = __builtin_cpu_supports("avx512f") ? 2048 : __builtin_cpu_supports("avx") ? 512 : 256;
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = (uint8_t)(i * 7 + 3);
    for (;;) {
        memset(out, 0, sizeof out);
        long bad = used == 2048  ? spin_avx512(in, out, 200000)
                   : used == 512 ? spin_avx(in, out, 200000)
                                 : spin_sse(in, out, 200000);
        if (bad || memcmp(in, out, used))
            fault("compute", bad);
        went_round(COMPUTE);
        struct timespec pause = {0, 200000};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, 0);
    }
}

static int ticks, pipes[2], word;

static void *wait_epoll(void *arg)
{
    (void)arg;
    int ep = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(ep, EPOLL_CTL_ADD, ticks, &event);
    for (;;) {
        int n = epoll_wait(ep, &event, 1, -1);
        uint64_t value;
        if (n < 0 && errno == EINTR) {
            __atomic_add_fetch(&interrupted, 1, __ATOMIC_RELAXED);
            continue;
        }
        if (n != 1 || read(ticks, &value, 8) != 8)
            fault("epoll_wait", n);
        went_round(EPOLL);
    }
}

static void *wait_read(void *arg)
{
    (void)arg;
    for (;;) {
        char byte;
        long n = read(pipes[0], &byte, 1);
        if (n != 1)
            fault("read", n);
        went_round(READ);
    }
}

static void *wait_sleep(void *arg)
{
    (void)arg;
    for (;;) {
        struct timespec time = {0, 5000000};
        if (nanosleep(&time, 0) != 0)
            fault("nanosleep", -1);
        went_round(SLEEP);
    }
}

static void *wait_futex(void *arg)
{
    (void)arg;
    for (;;) {
        int seen = __atomic_load_n(&word, __ATOMIC_SEQ_CST);
        long r = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
        if (r != 0 && errno != EAGAIN)
            fault("futex", r);
        went_round(FUTEX);
    }
}

static void *tick(void *arg)
{
    (void)arg;
    for (;;) {
        struct timespec time = {0, 5000000};
        nanosleep(&time, 0);
        uint64_t one = 1;
        if (write(ticks, &one, 8) != 8 || write(pipes[1], "x", 1) != 1)
            fault("tick", -1);
        __atomic_add_fetch(&word, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
    }
}

static double spoil(double a, double b) { return a * b + 0.5; }

// Functions to be called remotely: they clobber what a function may clobber.
int hook(void)
{
    int kept = errno;
    volatile double x = spoil(hook_calls + 1.5, 3.25);
    asm volatile("pxor %%xmm0, %%xmm0\n pxor %%xmm7, %%xmm7\n pxor %%xmm15, %%xmm15" ::: "xmm0", "xmm7", "xmm15");
    if (((uintptr_t)__builtin_frame_address(0) & 15) != 0 || x == 0)
        return -1;
    syscall(SYS_getppid);
    errno = kept;
    return 4711 + __atomic_add_fetch(&hook_calls, 1, __ATOMIC_RELAXED) * 0;
}

int hook_fault(void)
{
    *(volatile int *)16 = 1;
    return 0;
}

int hook_slow(void)
{
    struct timespec time = {0, 300000000};
    while (syscall(SYS_nanosleep, &time, &time) != 0)
        ;
    __atomic_add_fetch(&hook_calls, 1, __ATOMIC_RELAXED);
    return 1;
}

int main(void)
{
    void *(*kinds[])(void *) = {wait_epoll, wait_read, wait_sleep, wait_futex, compute, tick};
    ticks = eventfd(0, 0);
    if (pipe(pipes) != 0)
        return 1;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, kinds[i], 0);
    }
    printf("ready hook %p hook_fault %p hook_slow %p\n", (void *)hook, (void *)hook_fault, (void *)hook_slow);
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        printf("faults %ld interrupted %ld epoll %ld read %ld sleep %ld futex %ld compute %ld hooks %d\n", faults, interrupted, done[EPOLL], done[READ],
               done[SLEEP], done[FUTEX], done[COMPUTE], hook_calls);
        fflush(stdout);
    }
    return 0;
}
