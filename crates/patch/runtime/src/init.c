/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * init.c - the control block, the thread that wakes others, and the state after a fork
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "barrier.h"

struct sp_control sp_control = {.wake_fd = -1};
struct sp_config sp_config;
bool sp_ready;

/* Intervals at which the awaited threads are checked: first short ones, as most requests take some milliseconds. */
#define OFTEN_MS 1
#define OFTEN_TIMES 200
#define SELDOM_MS 10

/* Waits for the patcher's next ring or the limit; without a descriptor (the program may have closed all) it only sleeps. */
static void await_ring(int limit_ms)
{
    struct pollfd rung = {.fd = sp_control.wake_fd, .events = POLLIN};
    uint64_t rings;
    int ready = poll(&rung, 1, limit_ms);
    bool rang = ready == 1 && rung.revents == POLLIN && read(rung.fd, &rings, sizeof rings) == (ssize_t)sizeof rings;
    if (ready != 0 && !rang)
        poll(NULL, 0, SELDOM_MS);
}

/* Wakes the threads that a request awaits until it is settled. */
static void wake_awaited(void)
{
    uint32_t levels, again, before = 0, done = 0;
    bool pending = sp_barrier_awaited(&levels, &again);
    if (pending && sp_config.thread_count)
        sp_control.program_threads = (uint32_t)sp_config.thread_count(sp_config.data);
    for (unsigned round = 0; pending; round++) {
        /* a thread that has changed its level, or passed its point, since its wake-up may sleep again */
        done = levels == before ? done & ~again : 0;
        for (unsigned level = 0; level < SP_PRIORITIES_MAX && sp_config.wake; level++)
            if ((levels & ~done) >> level & 1 && sp_config.wake(level, sp_config.data) == 0)
                done |= 1u << level;
        await_ring(round < OFTEN_TIMES ? OFTEN_MS : SELDOM_MS);
        before = levels;
        pending = sp_barrier_awaited(&levels, &again);
    }
}

static void *waker(void *unused)
{
    (void)unused;
    for (;;) {
        await_ring(-1);
        wake_awaited();
    }
    return NULL;
}

static int start_waker(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* this thread must not receive the program's signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, waker, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!error)
        pthread_setname_np(thread, "stillpoint");
    return -error;
}

static void before_fork(void)
{
    sp_lock_take();
}

static void in_parent(void)
{
    sp_lock_leave();
}

static void in_child(void)
{
    sp_thread_forked();
    sp_barrier_forked();
    /* no thread reads it here; the child must not answer a patcher of the parent */
    close(sp_control.wake_fd);
    sp_control.wake_fd = -1;
}

/* Publishes the control block: a library that is only preloaded offers its word, so the tool need not search all threads for one. */
__attribute__((constructor)) static void publish(void)
{
    sp_control.size = sizeof sp_control;
    sp_control.version = SP_CONTROL_VERSION;
    sp_control.word_offset = (char *)&sp_word - sp_thread_pointer();
    sp_control.bell = (uint64_t)(uintptr_t)&sp_request_bell;
    sp_control.slots = (uint64_t)(uintptr_t)sp_slots;
    sp_control.slot_size = sizeof(struct sp_slot);
    uint64_t magic[2];
    memcpy(magic, SP_CONTROL_MAGIC, sizeof magic);
    memcpy(sp_control.magic + 8, &magic[1], 8);
    /* last: a patcher that sees the magic may rely on all of the above */
    __atomic_store_n((uint64_t *)(void *)sp_control.magic, magic[0], __ATOMIC_RELEASE);
}

int sp_init(const struct sp_config *config)
{
    if (!config || config->size != sizeof *config || config->priorities > SP_PRIORITIES_MAX)
        return -EINVAL;
    if (sp_ready)
        return -EALREADY;
    int fd = eventfd(0, EFD_CLOEXEC);
    if (fd < 0)
        return -errno;
    int error = sp_barrier_init();
    if (!error)
        error = -pthread_atfork(before_fork, in_parent, in_child);
    sp_config = *config;
    sp_control.wake_fd = fd;
    if (!error)
        error = start_waker();
    if (error) {
        close(fd);
        sp_control.wake_fd = -1;
        return error;
    }
    sp_ready = true;
    __atomic_store_n(&sp_control.priorities, config->priorities ? config->priorities : 1, __ATOMIC_RELEASE);
    return 0;
}
