// Signals, threads and processes that come and go. Modes by argument:
//   signals    SIGUSR1 (SA_RESTART) and SIGUSR2 (without) are sent to threads that block, each answered once
//   threads    threads are created and joined without end
//   processes  fork, vfork and posix_spawn without end
//   exec       a second thread calls exec when told to: the program then starts anew with argument "plain"
//   leader     the first thread ends, another one goes on
//   plain      waits
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static volatile long sent, handled[2], interrupted, rounds, faults;
static volatile int stop;
static char *self;

static void on_signal(int signal, siginfo_t *info, void *context)
{
    (void)context;
    if (info->si_code != SI_TKILL || info->si_pid != getpid())
        __atomic_add_fetch(&faults, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&handled[signal == SIGUSR2], 1, __ATOMIC_SEQ_CST);
}

static void *wait_read(void *arg)
{
    int *fds = arg;
    char byte;
    for (;;) {
        long n = read(fds[0], &byte, 1);
        if (n < 0 && errno == EINTR)
            __atomic_add_fetch(&interrupted, 1, __ATOMIC_SEQ_CST);
        else
            __atomic_add_fetch(&faults, 1, __ATOMIC_SEQ_CST);
    }
}

static void nap(long us)
{
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&time, 0);
}

static void *send_signals(void *arg)
{
    pthread_t to = *(pthread_t *)arg;
    while (!stop) {
        int signal = rounds & 1 ? SIGUSR2 : SIGUSR1;
        long before = handled[signal == SIGUSR2];
        pthread_kill(to, signal);
        sent++;
        // One at a time: signals of one kind that are pending together count as one.
        while (handled[signal == SIGUSR2] == before)
            nap(20);
        rounds++;
    }
    return 0;
}

static void *nothing(void *arg) { return arg; }

static void *make_threads(void *arg)
{
    (void)arg;
    while (!stop) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            if (pthread_create(&threads[i], 0, nothing, 0) != 0)
                faults++;
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], 0);
        rounds++;
        nap(500);
    }
    return 0;
}

static void expect_exit(pid_t pid, int code)
{
    int status;
    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != code) {
        fprintf(stderr, "fault: child %d ended with %#x\n", pid, status);
        faults++;
    }
}

static void *make_processes(void *arg)
{
    (void)arg;
    char *args[] = {"true", 0};
    while (!stop) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(3);
        expect_exit(pid, 3);
        pid = vfork();
        if (pid == 0)
            _exit(4);
        expect_exit(pid, 4);
        if (posix_spawnp(&pid, "true", 0, 0, args, environ) != 0)
            faults++;
        expect_exit(pid, 0);
        rounds++;
    }
    return 0;
}

static void *exec_when_told(void *arg)
{
    (void)arg;
    while (!stop)
        nap(500);
    execl(self, self, "plain", (char *)0);
    return 0;
}

static void serve(const char *ready)
{
    printf("%s\n", ready);
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (strncmp(line, "stop", 4) == 0)
            stop = 1;
        else
            printf("sent %ld restart %ld plain %ld interrupted %ld rounds %ld faults %ld pid %d\n", sent, handled[0],
                   handled[1], interrupted, rounds, faults, getpid());
        fflush(stdout);
    }
    exit(0);
}

static void *serve_alone(void *arg)
{
    (void)arg;
    nap(20000);
    serve("ready leader 1");
    return 0;
}

int main(int argc, char **argv)
{
    self = argv[0];
    const char *mode = argc > 1 ? argv[1] : "plain";
    pthread_t thread, sender;
    if (strcmp(mode, "signals") == 0) {
        int fds[2];
        if (pipe(fds) != 0)
            return 1;
        struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
        sigaction(SIGUSR1, &action, 0);
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGUSR2, &action, 0);
        pthread_create(&thread, 0, wait_read, fds);
        pthread_create(&sender, 0, send_signals, &thread);
    } else if (strcmp(mode, "threads") == 0) {
        pthread_create(&thread, 0, make_threads, 0);
        pthread_create(&thread, 0, make_threads, 0);
    } else if (strcmp(mode, "processes") == 0) {
        pthread_create(&thread, 0, make_processes, 0);
    } else if (strcmp(mode, "exec") == 0) {
        pthread_create(&thread, 0, exec_when_told, 0);
    } else if (strcmp(mode, "leader") == 0) {
        pthread_create(&thread, 0, serve_alone, 0);
        pthread_exit(0);
    }
    serve("ready pid 1");
}
