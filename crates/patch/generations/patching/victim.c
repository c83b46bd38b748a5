/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * victim.c - a program that is patched inside of the machine: its threads work, sleep, start, or stay in a patched function
 *
 * Each line that it reads is a command: `look` prints how many threads saw the old and the new code at their last look, and
 * how often a thread saw neither; `hold` makes one thread stay inside of a function that the patch changes, `release` lets it
 * continue; `suspend` leaves a coroutine suspended in a function that the patch changes, `resume` lets it end; `fork` prints how many nanoseconds a fork took; `ring` lets a worker of the kernel's read in the program's place.
 *
 *   victim [MIB]       after touching so much memory, and with threads that sleep between two looks
 *   victim points      with quiescence points in the threads that exist from the start
 */
#define _GNU_SOURCE
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stillpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORKERS = 3, SLEEPER = WORKERS, NEWBORN, HOLDER, THREADS };

/* Version that a thread saw at its last look, and the number of its looks. */
static struct {
    atomic_int version;
    atomic_long looks;
} seen[THREADS];
static atomic_long wrong;
static atomic_int hold, held;
static int wake[2];

/* Another unit might use it. */
extern const int step[2];
const int step[2] = {1, 1};

/* Shorter than a jump, and the next one right behind it. */
#define SHORT __attribute__((noipa, optimize("align-functions=1")))
SHORT int choose(int a, int b)
{
    return a;
}

SHORT void behind(void)
{
}

__attribute__((noipa)) int answer(int x)
{
    return choose(x + step[x & 1], x + 100);
}

__attribute__((noipa)) int slow_answer(int x)
{
    while (atomic_load(&hold)) {
        atomic_store(&held, 1);
        usleep(1000);
    }
    atomic_store(&held, 0);
    return choose(x + step[x & 1], x + 100);
}

/* A coroutine that the program switches to by its own assembler: nothing that it imports reveals it. */
void switch_to(void **save, void **load);
__asm__(".text\n.globl switch_to\n.type switch_to, @function\nswitch_to:\n"
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov (%rsi), %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
        ".size switch_to, . - switch_to\n");

static void *scheduler, *routine;

__attribute__((noipa)) int suspended_answer(int x)
{
    switch_to(&routine, &scheduler);
    return choose(x + step[x & 1], x + 100);
}

static void look(int thread, int found)
{
    int version = found == 6 ? 1 : found == 105 ? 2 : 0;
    if (!version)
        atomic_fetch_add(&wrong, 1);
    atomic_store(&seen[thread].version, version);
    atomic_fetch_add(&seen[thread].looks, 1);
}

static int calm;

static void *work(void *number)
{
    sp_thread_birth("worker");
    for (;;) {
        look((int)(long)number, answer(5));
        sp_quiescence_point();
        if (calm)
            usleep(1000);
    }
    return NULL;
}

/* Sleeps in the kernel until it is asked to look. */
static void *sleeper(void *unused)
{
    char byte;
    (void)unused;
    sp_thread_birth("sleeper");
    for (;;) {
        sp_park_begin();
        if (read(wake[0], &byte, 1) != 1)
            return NULL;
        sp_park_end();
        look(SLEEPER, answer(5));
    }
}

static void *newborn(void *unused)
{
    (void)unused;
    look(NEWBORN, answer(5));
    return NULL;
}

static void *bear(void *unused)
{
    pthread_t child;
    (void)unused;
    for (;;) {
        if (pthread_create(&child, NULL, newborn, NULL) == 0)
            pthread_join(child, NULL);
        usleep(1000);
    }
    return NULL;
}

static void *holder(void *unused)
{
    (void)unused;
    sp_thread_birth("holder");
    for (;;) {
        look(HOLDER, slow_answer(5));
        sp_quiescence_point();
        usleep(1000);
    }
    return NULL;
}

/* Every thread that can do so looks again, the sleeper too. */
static void report(void)
{
    int versions[3] = {0};
    for (int i = 0; i < THREADS; i++) {
        long before = atomic_load(&seen[i].looks);
        if (i == SLEEPER && write(wake[1], "", 1) != 1)
            return;
        /* twice: the first look may have begun before */
        while (atomic_load(&seen[i].looks) < before + (i == SLEEPER ? 1 : 2) && !(i == HOLDER && atomic_load(&held)))
            usleep(200);
        versions[atomic_load(&seen[i].version)]++;
    }
    printf("old %d new %d wrong %ld\n", versions[1], versions[2], atomic_load(&wrong));
}

/* Other frames of the coroutine, so that none of suspended_answer() is left on its stack. */
__attribute__((noipa)) static int elsewhere(int x)
{
    switch_to(&routine, &scheduler);
    return x;
}

static void coroutine(void)
{
    for (;;) {
        int found = suspended_answer(5);
        if (found != 6 && found != 105)
            atomic_fetch_add(&wrong, 1);
        elsewhere(found);
    }
}

static void suspend(void)
{
    enum { SIZE = 1 << 18 };
    if (!routine) {
        void **top = (void **)((char *)malloc(SIZE) + SIZE);
        /* six registers, and where to continue; aligned as after a call */
        top -= 10;
        top[6] = (void *)coroutine;
        routine = top;
    }
    switch_to(&scheduler, &routine);
    puts("suspended");
}

static void touch(size_t mib)
{
    calm = 1;
    if (mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0) == MAP_FAILED)
        exit(1);
}

static void fork_once(void)
{
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    pid_t child = fork();
    if (!child)
        _exit(0);
    clock_gettime(CLOCK_MONOTONIC, &after);
    waitpid(child, NULL, 0);
    printf("fork %ld\n", (after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec);
}

/* The data does not matter; the worker that read it stays. */
static void ask_worker(void)
{
    struct io_uring_params params = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 4, &params), from[2];
    size_t length = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    char *queue = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entry = mmap(NULL, sizeof *entry, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    static char byte;
    if (ring < 0 || queue == MAP_FAILED || (void *)entry == MAP_FAILED || pipe(from) || write(from[1], "", 1) != 1)
        return;
    entry->opcode = IORING_OP_READ;
    entry->flags = IOSQE_ASYNC;
    entry->fd = from[0];
    entry->addr = (unsigned long)&byte;
    entry->len = 1;
    *(unsigned *)(queue + params.sq_off.array) = 0;
    atomic_store((_Atomic unsigned *)(queue + params.sq_off.tail), 1);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1)
        puts("read");
}

int main(int argc, char **argv)
{
    char line[64];
    struct sp_config config = {.size = sizeof config};
    if (argc > 1 && !strcmp(argv[1], "points")) {
        if (sp_init(&config))
            return 1;
    } else if (argc > 1) {
        touch(strtoul(argv[1], NULL, 10));
    }
    pthread_t thread;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (pipe(wake))
        return 1;
    for (long i = 0; i < WORKERS; i++)
        pthread_create(&thread, NULL, work, (void *)i);
    pthread_create(&thread, NULL, sleeper, NULL);
    pthread_create(&thread, NULL, bear, NULL);
    pthread_create(&thread, NULL, holder, NULL);
    while (fgets(line, sizeof line, stdin)) {
        if (!strcmp(line, "hold\n")) {
            atomic_store(&hold, 1);
            while (!atomic_load(&held))
                usleep(200);
            puts("held");
        } else if (!strcmp(line, "release\n")) {
            atomic_store(&hold, 0);
            puts("released");
        } else if (!strcmp(line, "suspend\n")) {
            suspend();
        } else if (!strcmp(line, "resume\n")) {
            switch_to(&scheduler, &routine);
            puts("resumed");
        } else if (!strcmp(line, "fork\n")) {
            fork_once();
        } else if (!strcmp(line, "ring\n")) {
            ask_worker();
        } else {
            report();
        }
    }
    return 0;
}
