// Three ranges of its own memory: one that requests huge pages, one that refuses them, and one that requested them and
// has given up every second small page since. It prints their addresses. SIGUSR1 checks that they are as before.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE = 2 << 20, SIZE = 8 * HUGE, PAGE = 4096 };

static char *range(int wish)
{
    char *at = mmap(NULL, SIZE + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    uintptr_t start = ((uintptr_t)at + HUGE - 1) & -(uintptr_t)HUGE;
    // the parts outside of the aligned range are unmapped, so that it is one line of smaps
    if (start != (uintptr_t)at)
        munmap(at, start - (uintptr_t)at);
    munmap((char *)start + SIZE, (uintptr_t)at + HUGE - start);
    madvise((char *)start, SIZE, wish);
    return (char *)start;
}

static unsigned value(unsigned page, unsigned first) { return first + page * 31; }

static void fill(char *at, unsigned first)
{
    for (unsigned page = 0; page < SIZE / PAGE; page++)
        *(unsigned *)(at + page * PAGE) = value(page, first);
}

static unsigned wrong(const char *at, unsigned first, unsigned step)
{
    unsigned n = 0;
    for (unsigned page = 0; page < SIZE / PAGE; page += step)
        n += *(const unsigned *)(at + page * PAGE) != value(page, first);
    return n;
}

int main(void)
{
    sigset_t wanted;
    int got;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGUSR1);
    sigprocmask(SIG_BLOCK, &wanted, NULL);
    char *huge = range(MADV_HUGEPAGE), *small = range(MADV_NOHUGEPAGE), *half = range(MADV_HUGEPAGE);
    if (!huge || !small || !half)
        return perror("memory"), 1;
    fill(huge, 7);
    fill(small, 11);
    fill(half, 13);
    for (unsigned page = 1; page < SIZE / PAGE; page += 2)
        madvise(half + page * PAGE, PAGE, MADV_DONTNEED);
    setvbuf(stdout, NULL, _IONBF, 0);
    printf("ranges %lx %lx %lx\n", (long)huge, (long)small, (long)half);
    for (;;) {
        sigwait(&wanted, &got);
        puts(wrong(huge, 7, 1) + wrong(small, 11, 1) + wrong(half, 13, 2) ? "wrong" : "fine");
    }
}
