/* Everything that a process may do to itself while it is being patched. Four threads hammer patched functions all the
 * time; the mode says what else goes on.
 *
 *   storm CONTROL MODE
 *
 *   threads   creates and ends threads in a storm: stacks and thread control blocks are used again
 *   fork      children call the patched functions, and report
 *   vfork     vfork and exec, posix_spawn
 *   exec      on command, replaces itself by itself
 *   exit      on command, exits
 *   uring     io_uring with kernel workers and a polling thread, which carry their creator's fs_base
 *   altstack  signal handlers on alternate stacks, in and above patched functions
 *   longjmp   jumps out of patched functions
 *   sigtrap   threads that block SIGTRAP and all other signals, and one that ignores SIGTRAP
 *   idle      nothing else (the test sends SIGSTOP and SIGCONT)
 */
#include "control.h"

#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define VERSION 1

extern char **environ;
static char **arguments;

PATCHED long leaf(long x) { return x * 48 + VERSION; }
PATCHED long inner(long x) { return (x & 1) << 8 | VERSION; }
PATCHED long mid(long x) { return inner(x) << 8 | VERSION; }
PATCHED long outer(long x) { return mid(x) << 8 | VERSION; }

/* Never returns by itself: the way out is a jump over its frames. */
PATCHED void leave(jmp_buf *there, int depth) {
    int below = depth;
    __asm__ volatile("" : "+r"(below));
    if (depth == 0) longjmp(*there, VERSION);
    if (below < 0) return; /* never; the compiler takes it for endless recursion otherwise */
    leave(there, depth - 1);
    __asm__ volatile("" : "+r"(below));
}

/* Stands on the ordinary stack while its signal's handler runs on the alternate one. */
PATCHED long raises(int signal) {
    long before = VERSION;
    __asm__ volatile("" : "+r"(before));
    raise(signal);
    return before << 4 | VERSION;
}

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static void rounds(struct observer *o, int count) {
    for (long n = 0; n < count; n++) {
        uint64_t p = phase_now();
        answer(o, p, leaf(n), n * 3, "leaf");
        p = phase_now();
        long chain = outer(n);
        if ((chain & 255) != (chain >> 8 & 255) || (chain & 255) != (chain >> 16 & 255) || chain >> 24 != (n & 1))
            violation("chain: %#lx is of more than one version", chain);
        observe(o, p, chain & 255, "chain");
    }
}

static void *hammer(void *arg) {
    struct observer o = observer_new(arg);
    while (!stopping()) {
        rounds(&o, 100);
        usleep(200);
    }
    return NULL;
}

static void *short_life(void *arg) {
    struct observer *shared = arg;
    struct observer o = {.slot = shared->slot};
    rounds(&o, 20);
    return NULL;
}

static void *thread_storm(void *arg) {
    struct observer o = observer_new(arg);
    while (!stopping()) {
        pthread_t threads[4];
        int made = 0;
        for (int i = 0; i < 4; i++) made += pthread_create(&threads[made], NULL, short_life, &o) == 0;
        for (int i = 0; i < made; i++) pthread_join(threads[i], NULL);
    }
    return NULL;
}

static int wait_for(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) {
            violation("waitpid: %m");
            return 0;
        }
    return status;
}

/* A child carries the transition of the moment of its birth, which nobody completes for it: any version may answer,
 * but a chain is of one version and nothing crashes. */
static void child_work(void) {
    for (long n = 0; n < 2000; n++) {
        long chain = outer(n), one = leaf(n);
        if ((chain & 255) != (chain >> 8 & 255) || (chain & 255) != (chain >> 16 & 255)) _exit(91);
        if (one >> 4 != n * 3 || (one & 15) < 1 || (one & 15) > 3) _exit(92);
    }
    _exit(0);
}

static void *fork_storm(void *arg) {
    struct observer o = observer_new(arg);
    while (!stopping()) {
        pid_t child = fork();
        if (child == 0) child_work();
        int status = wait_for(child);
        if (status) violation("a forked child ended with status %#x", status);
        rounds(&o, 10);
    }
    return NULL;
}

static void *vfork_storm(void *arg) {
    struct observer o = observer_new(arg);
    char *command[] = {"true", NULL};
    while (!stopping()) {
        pid_t child = vfork();
        if (child == 0) {
            /* Shares this thread's memory, and its generation word, until here. */
            leaf(1);
            execv("/bin/true", command);
            _exit(93);
        }
        int status = wait_for(child);
        if (status) violation("a vforked child ended with status %#x", status);
        if (posix_spawn(&child, "/bin/true", NULL, NULL, command, environ)) violation("posix_spawn");
        status = wait_for(child);
        if (status) violation("a spawned child ended with status %#x", status);
        rounds(&o, 10);
    }
    return NULL;
}

/* Reads a pipe through io_uring; IOSQE_ASYNC has a kernel worker do it, which stands among this process's threads. */
static void *uring(void *arg) {
    struct observer o = observer_new(arg);
    struct io_uring_params params = {.flags = IORING_SETUP_SQPOLL, .sq_thread_idle = 10};
    int ring = (int)syscall(SYS_io_uring_setup, 8, &params), fds[2];
    if (ring < 0 || pipe2(fds, O_CLOEXEC)) {
        violation("io_uring_setup: %m");
        return NULL;
    }
    size_t sq_size = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq_size = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    char *sq = mmap(NULL, sq_size, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, cq_size, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    struct io_uring_sqe *entries = mmap(NULL, params.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED,
                                        ring, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || (void *)entries == MAP_FAILED) {
        violation("io_uring mmap: %m");
        return NULL;
    }
    _Atomic unsigned *tail = (void *)(sq + params.sq_off.tail), *flags = (void *)(sq + params.sq_off.flags);
    _Atomic unsigned *seen = (void *)(cq + params.cq_off.head), *done = (void *)(cq + params.cq_off.tail);
    unsigned mask = params.sq_entries - 1;
    while (!stopping()) {
        char byte = 0;
        unsigned at = atomic_load(tail);
        entries[at & mask] = (struct io_uring_sqe){.opcode = IORING_OP_READ, .flags = IOSQE_ASYNC, .fd = fds[0],
                                                   .addr = (uintptr_t)&byte, .len = 1};
        ((unsigned *)(sq + params.sq_off.array))[at & mask] = at & mask;
        atomic_store(tail, at + 1);
        if (atomic_load(flags) & IORING_SQ_NEED_WAKEUP)
            syscall(SYS_io_uring_enter, ring, 0, 0, IORING_ENTER_SQ_WAKEUP, NULL, 0);
        for (int i = 0; i < 20 && atomic_load(seen) == atomic_load(done); i++) {
            rounds(&o, 5);
            usleep(1000);
        }
        if (write(fds[1], "x", 1) != 1) violation("write: %m");
        while (atomic_load(seen) == atomic_load(done))
            if (syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_SQ_WAKEUP, NULL, 0) < 0)
                violation("io_uring_enter: %m");
        struct io_uring_cqe *cqe = (void *)(cq + params.cq_off.cqes);
        int result = cqe[atomic_load(seen) & (params.cq_entries - 1)].res;
        if (result != 1 || byte != 'x') violation("a read through io_uring returned %d", result);
        atomic_store(seen, atomic_load(seen) + 1);
    }
    return NULL;
}

static __thread struct observer *in_handler;

static void on_signal(int signal) {
    (void)signal;
    int saved = errno;
    if (in_handler) rounds(in_handler, 20);
    errno = saved;
}

static void *altstack(void *arg) {
    struct observer o = observer_new(arg), handler = observer_new("handler");
    size_t size = 64 * 1024;
    stack_t stack = {.ss_sp = malloc(size), .ss_size = size};
    if (!stack.ss_sp || sigaltstack(&stack, NULL)) violation("sigaltstack: %m");
    in_handler = &handler;
    while (!stopping()) {
        uint64_t p = phase_now();
        long both = raises(SIGUSR1);
        if ((both & 15) != both >> 4) violation("raises: %#lx is of more than one version", both);
        observe(&o, p, both & 15, "raises");
        usleep(50);
    }
    return NULL;
}

static void *jumper(void *arg) {
    struct observer o = observer_new(arg);
    while (!stopping()) {
        jmp_buf here;
        uint64_t p = phase_now();
        int version = setjmp(here);
        if (version == 0) leave(&here, 20);
        observe(&o, p, version, "leave");
    }
    return NULL;
}

static void *deaf(void *arg) {
    struct observer o = observer_new(arg);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    while (!stopping()) {
        rounds(&o, 100);
        usleep(100);
    }
    return NULL;
}

static uint32_t slots_expected;

static void start(int count, void *(*body)(void *), const char *role) {
    slots_expected += (uint32_t)count;
    pthread_t thread;
    for (int i = 0; i < count; i++)
        if (pthread_create(&thread, NULL, body, (void *)role)) violation("pthread_create: %m");
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    control_open(argv[1]);
    arguments = argv;
    const char *mode = argv[2];
    start(4, hammer, "hammer");
    if (!strcmp(mode, "threads")) start(4, thread_storm, "threads");
    if (!strcmp(mode, "fork")) start(2, fork_storm, "fork");
    if (!strcmp(mode, "vfork")) start(2, vfork_storm, "vfork");
    if (!strcmp(mode, "uring")) start(2, uring, "uring");
    if (!strcmp(mode, "longjmp")) start(4, jumper, "jumper");
    if (!strcmp(mode, "altstack")) {
        struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART};
        sigaction(SIGUSR1, &action, NULL);
        start(4, altstack, "altstack");
        slots_expected += 4; /* their handlers have their own */
    }
    if (!strcmp(mode, "sigtrap")) {
        signal(SIGTRAP, SIG_IGN);
        start(4, deaf, "deaf");
    }
    await_slots(slots_expected);
    while (!stopping()) {
        uint32_t command = atomic_exchange(&control->command, 0);
        if (command && !strcmp(mode, "exec")) execv("/proc/self/exe", arguments);
        if (command && !strcmp(mode, "exit")) exit(7);
        usleep(1000);
    }
    return atomic_load(&control->violations) != 0;
}
