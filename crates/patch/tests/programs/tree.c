/* A tree of processes of one executable: the first forks workers, and replaces those that end.
 *
 *   tree CONTROL [workers [rounds of a worker before it ends, 0: never]]
 */
#include "control.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define VERSION 1

PATCHED long leaf(long x) { return x * 48 + VERSION; }
PATCHED long inner(long x) { return (x & 1) << 8 | VERSION; }
PATCHED long outer(long x) { return inner(x) << 8 | VERSION; }

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static void work(struct slot *slot, long rounds) {
    struct observer o = {.slot = slot};
    atomic_store(&slot->tid, getpid());
    for (long n = 0; !stopping() && (rounds == 0 || n < rounds); n++) {
        uint64_t p = phase_now();
        answer(&o, p, leaf(n), n * 3, "leaf");
        p = phase_now();
        long chain = outer(n);
        if ((chain & 255) != (chain >> 8 & 255)) violation("chain: %#lx is of more than one version", chain);
        observe(&o, p, chain & 255, "chain");
        usleep(2000);
    }
}

static pid_t start(int i, long rounds) {
    pid_t parent = getpid(), child = fork();
    if (child < 0) violation("fork: %m");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) work(&control->slots[i], rounds);
        _exit(0);
    }
    return child;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    int workers = argc > 2 ? atoi(argv[2]) : 4;
    long rounds = argc > 3 ? atol(argv[3]) : 0;
    if (workers >= SLOTS) return 2;
    pid_t children[SLOTS] = {0};
    atomic_store(&control->slots_used, (uint32_t)workers + 1);
    strcpy(control->slots[0].role, "parent");
    for (int i = 1; i <= workers; i++) {
        strcpy(control->slots[i].role, "worker");
        children[i] = start(i, rounds);
    }
    struct observer o = {.slot = &control->slots[0]};
    atomic_store(&o.slot->tid, getpid());
    await_slots(0);
    while (!stopping()) {
        int status;
        pid_t ended = waitpid(-1, &status, WNOHANG);
        if (ended > 0 && status) violation("a worker ended with status %#x", status);
        for (int i = 1; ended > 0 && i <= workers; i++)
            if (children[i] == ended) children[i] = start(i, rounds);
        uint64_t p = phase_now();
        answer(&o, p, leaf(3), 9, "leaf");
        usleep(1000);
    }
    return atomic_load(&control->violations) != 0;
}
