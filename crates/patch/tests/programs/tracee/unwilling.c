// A thread that sleeps in state D again and again, as one does that waits for a disk: it reads its own memory through the
// kernel, which waits for a page that another thread brings. That one does so only after a third has gone on: where the
// others stand until the first has stopped, none ever does. "report" on standard input prints how far each came, end of
// input ends the program. The argument is how many steps of the third a sleep lasts.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };
static long steps, sleeps, faults, lasts;
static int pages;
static char *page;

static void pause_1_ms(void)
{
    struct timespec time = {0, 1000000};
    while (nanosleep(&time, &time) != 0)
        ;
}

static void *step(void *arg)
{
    for (;;) {
        pause_1_ms();
        __atomic_add_fetch(&steps, 1, __ATOMIC_SEQ_CST);
    }
    return arg;
}

static void *bring(void *arg)
{
    struct uffd_msg message;
    for (;;) {
        if (read(pages, &message, sizeof message) != sizeof message || message.event != UFFD_EVENT_PAGEFAULT)
            continue;
        long until = __atomic_load_n(&steps, __ATOMIC_SEQ_CST) + lasts;
        while (__atomic_load_n(&steps, __ATOMIC_SEQ_CST) < until)
            pause_1_ms();
        struct uffdio_zeropage zero = {.range = {.start = (uintptr_t)page, .len = PAGE}};
        if (ioctl(pages, UFFDIO_ZEROPAGE, &zero) != 0)
            faults++;
    }
    return arg;
}

static void *sleep_unwilling(void *arg)
{
    char byte;
    struct iovec here = {&byte, 1}, there = {page, 1};
    for (;;) {
        madvise(page, PAGE, MADV_DONTNEED);
        byte = 1;
        if (syscall(SYS_process_vm_readv, getpid(), &here, 1L, &there, 1L, 0L) != 1 || byte != 0)
            faults++;
        __atomic_add_fetch(&sleeps, 1, __ATOMIC_SEQ_CST);
        pause_1_ms();
    }
    return arg;
}

int main(int argc, char **argv)
{
    lasts = argc > 1 ? atol(argv[1]) : 1;
    pages = syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    page = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register all = {.range = {(uintptr_t)page, PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (pages < 0 || ioctl(pages, UFFDIO_API, &api) != 0 || ioctl(pages, UFFDIO_REGISTER, &all) != 0) {
        perror("userfaultfd");
        return 1;
    }
    void *(*threads[])(void *) = {step, bring, sleep_unwilling};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, threads[i], 0);
    }
    printf("ready lasts %ld\n", lasts);
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        printf("faults %ld steps %ld sleeps %ld\n", faults, steps, sleeps);
        fflush(stdout);
    }
    return 0;
}
