// Huge pages of its own, and some that it shares with a child. SIGUSR1 checks that they are as before.
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 2, SIZE = PAGES << 21, CHILD_AT = 4096 };

static void *pages(int shared)
{
    return mmap(NULL, SIZE, PROT_READ | PROT_WRITE, shared | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
}

static void fill(unsigned *at, unsigned first)
{
    for (unsigned i = 0; i < SIZE / sizeof *at; i++)
        at[i] = first + i;
}

static unsigned wrong(const unsigned *at, unsigned first)
{
    unsigned n = 0;
    for (unsigned i = 0; i < SIZE / sizeof *at; i++)
        n += at[i] != first + i;
    return n;
}

int main(void)
{
    sigset_t wanted;
    int got;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGUSR1);
    sigprocmask(SIG_BLOCK, &wanted, NULL);
    unsigned *own = pages(MAP_PRIVATE), *common = pages(MAP_SHARED);
    if (own == MAP_FAILED || common == MAP_FAILED)
        return perror("huge pages"), 1;
    fill(own, 7);
    fill(common, 11);
    pid_t child = fork();
    if (child == 0) {
        // from the private copy to the shared memory
        sigwait(&wanted, &got);
        common[CHILD_AT] = wrong(own, 7) ? 0 : 99;
        _exit(0);
    }
    setvbuf(stdout, NULL, _IONBF, 0);
    puts("ready");
    sigwait(&wanted, &got);
    unsigned bad = wrong(own, 7) + wrong(common, 11);
    kill(child, SIGUSR1);
    waitpid(child, NULL, 0);
    puts(bad || common[CHILD_AT] != 99 ? "wrong" : "fine");
    pause();
}
