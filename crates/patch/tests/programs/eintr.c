/* Waits in 32 ways, one thread each, in such a way that nothing ever comes: each wait ends by its time-out, or not at
 * all. Every return is checked: an error EINTR counts, and so does a time-out that took longer than it should.
 *
 * The first line is "ready" and the process id. A line on standard input is answered by one line for each wait,
 *
 *     NAME TIMEOUT_MS RETURNS INTERRUPTED UNEXPECTED WORST_MS
 *
 * and "end". TIMEOUT_MS is 0 for a wait without time-out. End of input ends the program.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TIMEOUT_MS = 2000 };

static const struct timespec limit = {TIMEOUT_MS / 1000, TIMEOUT_MS % 1000 * 1000000L};
static const struct timeval socket_limit = {TIMEOUT_MS / 1000, TIMEOUT_MS % 1000 * 1000L};

/* What the waits wait for. */
static int quiet_pipe[2], quiet_pair[2], listener, slow_listener, slow_pair[2], quiet_udp, lock_file;
static int epoll_fd, event_fd, inotify_fd, semaphores, queue, word;
static unsigned long aio;
static pid_t child;
static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER;
static sem_t empty;

static struct timespec later(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    t.tv_sec += limit.tv_sec;
    t.tv_nsec += limit.tv_nsec;
    if (t.tv_nsec >= 1000000000) {
        t.tv_nsec -= 1000000000;
        t.tv_sec++;
    }
    return t;
}

/* Functions that return their error instead of setting errno. */
static long by_value(int error)
{
    errno = error;
    return error ? -1 : 0;
}

static char byte;
static struct sembuf take_one = {0, -1, 0};
#define EVENT (&(struct epoll_event){0})
#define QUIET (&(struct pollfd){quiet_pipe[0], POLLIN, 0})

static long w_epoll_wait(void) { return epoll_wait(epoll_fd, EVENT, 1, -1); }
static long w_epoll_wait_limit(void) { return epoll_wait(epoll_fd, EVENT, 1, TIMEOUT_MS); }
static long w_epoll_pwait(void)
{
    sigset_t none;
    sigemptyset(&none);
    return epoll_pwait(epoll_fd, EVENT, 1, TIMEOUT_MS, &none);
}
static long w_poll(void) { return poll(QUIET, 1, -1); }
static long w_poll_limit(void) { return poll(QUIET, 1, TIMEOUT_MS); }
static long w_ppoll(void) { return ppoll(QUIET, 1, &limit, 0); }
static long w_select(void)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(quiet_pipe[0], &set);
    return select(quiet_pipe[0] + 1, &set, 0, 0, &(struct timeval){socket_limit.tv_sec, socket_limit.tv_usec});
}
static long w_read_pipe(void) { return read(quiet_pipe[0], &byte, 1); }
static long w_read_eventfd(void)
{
    uint64_t value;
    return read(event_fd, &value, 8);
}
static long w_read_inotify(void)
{
    char buffer[512];
    return read(inotify_fd, buffer, sizeof buffer);
}
static long w_nanosleep(void) { return nanosleep(&limit, 0); }
static long w_clock_nanosleep(void)
{
    struct timespec end = later(CLOCK_MONOTONIC);
    return by_value(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, 0));
}
static long w_futex(void) { return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, 0, 0, 0); }
static long w_futex_limit(void) { return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &limit, 0, 0); }
static long w_futex_until(void)
{
    struct timespec end = later(CLOCK_MONOTONIC);
    return syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 0, &end, 0, ~0u);
}
static long w_cond(void)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    struct timespec end = later(CLOCK_REALTIME);
    pthread_mutex_lock(&mutex);
    return by_value(pthread_cond_timedwait(&never, &mutex, &end));
}
static long w_mutex(void) { return by_value(pthread_mutex_lock(&taken)); }
static long w_sem(void) { return sem_wait(&empty); }
static long w_accept(void) { return accept(listener, 0, 0); }
static long w_accept_limit(void) { return accept(slow_listener, 0, 0); }
static long w_recv(void) { return recv(quiet_pair[0], &byte, 1, 0); }
static long w_recv_limit(void) { return recv(slow_pair[0], &byte, 1, 0); }
static long w_recvfrom(void) { return recvfrom(quiet_udp, &byte, 1, 0, 0, 0); }
static long w_sigtimedwait(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    return sigtimedwait(&set, 0, &limit);
}
static long w_semop(void) { return semop(semaphores, &take_one, 1); }
static long w_semtimedop(void) { return semtimedop(semaphores, &take_one, 1, &limit); }
static long w_msgrcv(void)
{
    struct { long type; char text[8]; } message;
    return msgrcv(queue, &message, sizeof message.text, 0, 0);
}
static long w_waitpid(void) { return waitpid(child, 0, 0); }
static long w_lock(void)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return fcntl(lock_file, F_SETLKW, &lock);
}
static long w_io_getevents(void)
{
    char event[64];
    struct timespec most = limit;
    return syscall(SYS_io_getevents, aio, 1, 1, event, &most);
}
static long w_sigsuspend(void)
{
    sigset_t all;
    sigfillset(&all);
    return sigsuspend(&all);
}

static long w_pause(void) { return pause(); }

static struct wait {
    const char *name;
    long (*wait)(void);
    /* What it returns and which error it sets when its time is over; no time-out where both are 0. */
    int timed, expected, error;
    long returns, interrupted, unexpected, worst_ms;
} waits[] = {
    {"epoll_wait", w_epoll_wait, 0, 0, 0},
    {"epoll_wait_limit", w_epoll_wait_limit, 1, 0, 0},
    {"epoll_pwait_limit", w_epoll_pwait, 1, 0, 0},
    {"poll", w_poll, 0, 0, 0},
    {"poll_limit", w_poll_limit, 1, 0, 0},
    {"ppoll_limit", w_ppoll, 1, 0, 0},
    {"select_limit", w_select, 1, 0, 0},
    {"read_pipe", w_read_pipe, 0, 0, 0},
    {"read_eventfd", w_read_eventfd, 0, 0, 0},
    {"read_inotify", w_read_inotify, 0, 0, 0},
    {"nanosleep", w_nanosleep, 1, 0, 0},
    {"clock_nanosleep_until", w_clock_nanosleep, 1, 0, 0},
    {"futex_wait", w_futex, 0, 0, 0},
    {"futex_wait_limit", w_futex_limit, 1, -1, ETIMEDOUT},
    {"futex_wait_until", w_futex_until, 1, -1, ETIMEDOUT},
    {"pthread_cond_timedwait", w_cond, 1, -1, ETIMEDOUT},
    {"pthread_mutex_lock", w_mutex, 0, 0, 0},
    {"sem_wait", w_sem, 0, 0, 0},
    {"accept", w_accept, 0, 0, 0},
    {"accept_limit", w_accept_limit, 1, -1, EAGAIN},
    {"recv", w_recv, 0, 0, 0},
    {"recv_limit", w_recv_limit, 1, -1, EAGAIN},
    {"recvfrom_udp", w_recvfrom, 0, 0, 0},
    {"sigtimedwait", w_sigtimedwait, 1, -1, EAGAIN},
    {"semop", w_semop, 0, 0, 0},
    {"semtimedop", w_semtimedop, 1, -1, EAGAIN},
    {"msgrcv", w_msgrcv, 0, 0, 0},
    {"waitpid", w_waitpid, 0, 0, 0},
    {"fcntl_setlkw", w_lock, 0, 0, 0},
    {"io_getevents_limit", w_io_getevents, 1, 0, 0},
    {"sigsuspend", w_sigsuspend, 0, 0, 0},
    {"pause", w_pause, 0, 0, 0},
};
enum { WAITS = sizeof waits / sizeof *waits };
_Static_assert(WAITS == 32, "the 32 waits");

static long now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void *go(void *arg)
{
    struct wait *w = arg;
    for (;;) {
        long begin = now_ms();
        errno = 0;
        long result = w->wait();
        int error = result < 0 ? errno : 0;
        long took = now_ms() - begin;
        if (error == EINTR)
            w->interrupted++;
        else if (!w->timed || result != w->expected || error != w->error || took < TIMEOUT_MS - 5)
            w->unexpected++;
        if (w->timed && took > w->worst_ms)
            w->worst_ms = took;
        __atomic_add_fetch(&w->returns, 1, __ATOMIC_RELEASE);
    }
}

static int listening(void)
{
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    listen(s, 1);
    return s;
}

static void prepare(void)
{
    struct sockaddr_in any = {.sin_family = AF_INET};
    epoll_fd = epoll_create1(0);
    event_fd = eventfd(0, 0);
    inotify_fd = inotify_init();
    pipe(quiet_pipe);
    socketpair(AF_UNIX, SOCK_STREAM, 0, quiet_pair);
    socketpair(AF_UNIX, SOCK_STREAM, 0, slow_pair);
    setsockopt(slow_pair[0], SOL_SOCKET, SO_RCVTIMEO, &socket_limit, sizeof socket_limit);
    listener = listening();
    slow_listener = listening();
    setsockopt(slow_listener, SOL_SOCKET, SO_RCVTIMEO, &socket_limit, sizeof socket_limit);
    quiet_udp = socket(AF_INET, SOCK_DGRAM, 0);
    bind(quiet_udp, (struct sockaddr *)&any, sizeof any);
    semaphores = semget(IPC_PRIVATE, 1, 0600);
    queue = msgget(IPC_PRIVATE, 0600);
    syscall(SYS_io_setup, 8, &aio);
    sem_init(&empty, 0, 0);
    pthread_mutex_lock(&taken);
    lock_file = memfd_create("lock", 0);

    /* A child that holds the lock and does not end. */
    int holds[2];
    pipe(holds);
    child = fork();
    if (child == 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        fcntl(lock_file, F_SETLK, &lock);
        write(holds[1], "x", 1);
        close(quiet_pipe[1]);
        for (;;)
            pause();
    }
    read(holds[0], &byte, 1);
}

int main(void)
{
    /* Blocked everywhere: only sigtimedwait takes it, and nobody sends it. */
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &set, 0);
    prepare();
    for (int i = 0; i < WAITS; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, go, &waits[i]);
    }
    printf("ready %d\n", getpid());
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        for (int i = 0; i < WAITS; i++) {
            struct wait *w = &waits[i];
            long returns = __atomic_load_n(&w->returns, __ATOMIC_ACQUIRE);
            printf("%s %d %ld %ld %ld %ld\n", w->name, w->timed ? TIMEOUT_MS : 0, returns, w->interrupted,
                   w->unexpected, w->worst_ms);
        }
        puts("end");
        fflush(stdout);
    }
    kill(child, SIGKILL);
    semctl(semaphores, 0, IPC_RMID);
    msgctl(queue, IPC_RMID, 0);
    return 0;
}
