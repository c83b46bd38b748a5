/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * init.c - the control block, the thread that wakes others, and what a fork leaves of it
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "barrier.h"

struct sp_control sp_control = {.wake_fd = -1};
struct sp_config sp_config;
bool sp_ready;

static void pause_ms(long ms)
{
    struct timespec pause = {.tv_nsec = ms * 1000000};
    nanosleep(&pause, NULL);
}

/* Wakes the threads that a request awaits, level by level, until it is settled. */
static void wake_awaited(void)
{
    int done_with = -1, level;
    while ((level = sp_barrier_awaited()) >= 0) {
        if (level != done_with && sp_config.wake && sp_config.wake((unsigned)level, sp_config.data) == 0)
            done_with = level;
        pause_ms(1);
    }
}

static void *waker(void *unused)
{
    uint64_t rung;
    (void)unused;
    for (;;) {
        ssize_t got = read(sp_control.wake_fd, &rung, sizeof rung);
        if (got == (ssize_t)sizeof rung)
            wake_awaited();
        else if (errno != EINTR)
            return NULL;
    }
}

static int start_waker(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* the program's signals are none of ours */
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
    pthread_mutex_lock(&sp_lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&sp_lock);
}

static void in_child(void)
{
    sp_thread_forked();
    sp_barrier_forked();
    /* nobody reads it here; a patcher of the parent must not be answered by the child */
    close(sp_control.wake_fd);
    sp_control.wake_fd = -1;
}

static ptrdiff_t word_offset(void)
{
    uintptr_t thread_pointer;
    __asm__("movq %%fs:0, %0" : "=r"(thread_pointer));
    return (ptrdiff_t)((uintptr_t)&sp_word - thread_pointer);
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
    sp_control.size = sizeof sp_control;
    sp_control.version = SP_CONTROL_VERSION;
    sp_control.word_offset = word_offset();
    sp_control.bell = (uint64_t)(uintptr_t)&sp_request_bell;
    sp_control.slots = (uint64_t)(uintptr_t)sp_slots;
    sp_control.slot_size = sizeof(struct sp_slot);
    sp_control.priorities = config->priorities ? config->priorities : 1;
    sp_ready = true;
    uint64_t magic[2];
    memcpy(magic, SP_CONTROL_MAGIC, sizeof magic);
    memcpy(sp_control.magic + 8, &magic[1], 8);
    /* last: a patcher that sees the magic may rely on all of the above */
    __atomic_store_n((uint64_t *)(void *)sp_control.magic, magic[0], __ATOMIC_RELEASE);
    return 0;
}
