/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * contract.c - results of each call, in and out of order; forks; a program that never calls sp_init
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stillpoint_abi.h"
#include "stillpoint_view.h"

#define EXPECT(call, want)                                                                                             \
    do {                                                                                                               \
        long got = (call);                                                                                             \
        if (got != (want)) {                                                                                           \
            fprintf(stderr, "%s:%d: %s is %ld, not %ld\n", __FILE__, __LINE__, #call, got, (long)(want));              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void *stranger(void *unused)
{
    (void)unused;
    EXPECT(sp_thread_death(), -ESRCH);
    EXPECT(sp_park_begin(), -ESRCH);
    EXPECT(sp_park_end(), -ESRCH);
    EXPECT(sp_set_priority(0), -ESRCH);
    EXPECT(sp_transition_pending(), 0);
    sp_quiescence_point();
    return NULL;
}

/* Checks a library that is only loaded: it offers its word and has no registered threads. */
static void without_init(void)
{
    EXPECT(memcmp(sp_control.magic, SP_CONTROL_MAGIC, sizeof sp_control.magic), 0);
    EXPECT(sp_control.priorities, 0);
    EXPECT(sp_control.word_offset != 0, 1);
    EXPECT(sp_thread_birth("early"), 0);
    EXPECT(sp_park_begin(), 0);
    EXPECT(sp_thread_death(), 0);
    sp_quiescence_point();
}

/* Checks that a kernel without generations refuses, and that memory is unchanged. */
static void views_refused(void)
{
    static char page[4096] __attribute__((aligned(4096)));
    if (sp_view_supported())
        return;
    EXPECT(sp_view_pin(page, sizeof page), -ENOSYS);
    page[0] = 1;
    EXPECT(sp_view_create(0), -ENOSYS);
    EXPECT(sp_view_write(1, page, page, 1), -ENOSYS);
    EXPECT(sp_view_enter(0), -ENOSYS);
    EXPECT(sp_view_delete(1), -ENOSYS);
}

static void wrong_configs(void)
{
    struct sp_config config = {.size = sizeof config - 1};
    EXPECT(sp_init(NULL), -EINVAL);
    EXPECT(sp_init(&config), -EINVAL);
    config = (struct sp_config){.size = sizeof config, .priorities = SP_PRIORITIES_MAX + 1};
    EXPECT(sp_init(&config), -EINVAL);
}

static void in_child(void)
{
    EXPECT(sp_control.wake_fd, -1);
    EXPECT(sp_park_begin(), 0);
    EXPECT(sp_park_end(), 0);
    EXPECT(sp_thread_death(), 0);
    EXPECT(sp_thread_birth("again"), 0);
    EXPECT(sp_control.slots_used, 1);
    _exit(0);
}

static void ask(uint32_t number, uint32_t mode, uint64_t deadline_ns)
{
    struct sp_request request = {
        .number = number,
        .transition = 1000 + number,
        .mode = mode,
        .deadline_ns = deadline_ns,
        .word_offset = sp_control.word_offset,
    };
    request.check = sp_request_check(&request);
    sp_control.answer = (struct sp_answer){.number = number};
    sp_control.request = request;
    __atomic_store_n(&sp_request_bell, number, __ATOMIC_SEQ_CST);
}

static uint32_t *word_address(void)
{
    char *thread_pointer;
    __asm__("movq %%fs:0, %0" : "=r"(thread_pointer));
    return (uint32_t *)(void *)(thread_pointer + sp_control.word_offset);
}

static uint32_t word(void)
{
    return *word_address();
}

/* Checks requests to one thread: torn, local, abandoned at the deadline, and made to a parent. */
static void requests(void)
{
    int status;
    ask(1, SP_LOCAL, UINT64_MAX);
    sp_control.request.check++;
    sp_quiescence_point();
    EXPECT(word(), 0);
    EXPECT(sp_transition_pending(), 1);
    sp_control.request.check--;
    sp_quiescence_point();
    EXPECT(word(), 1001);
    EXPECT(sp_transition_pending(), 0);
    ask(2, SP_GLOBAL, 1);
    sp_quiescence_point();
    EXPECT(sp_control.answer.outcome, SP_ABANDONED);
    EXPECT(word(), 1001);
    ask(3, SP_GLOBAL, UINT64_MAX);
    pid_t child = fork();
    if (child == 0) {
        /* the child has no request: otherwise it would wait for ever */
        sp_quiescence_point();
        _exit(word() != 1001);
    }
    EXPECT(waitpid(child, &status, 0), child);
    EXPECT(status, 0);
    sp_control.answer.outcome = SP_RELEASED;
    sp_quiescence_point();
    EXPECT(word(), 1003);
    /* a thread that ends while parked takes it at its end */
    EXPECT(sp_park_begin(), 0);
    ask(4, SP_LOCAL, UINT64_MAX);
    EXPECT(sp_thread_death(), 0);
    EXPECT(word(), 1004);
    EXPECT(sp_thread_birth_group("main", "workers"), 0);
    /* a later transition was stored from outside while it was parked */
    EXPECT(sp_park_begin(), 0);
    ask(5, SP_LOCAL, UINT64_MAX);
    *word_address() = 2000;
    EXPECT(sp_park_end(), 0);
    EXPECT(word(), 2000);
    *word_address() = 0;
}

int main(void)
{
    struct sp_config config = {.size = sizeof config, .priorities = 2};
    pthread_t thread;
    int status;
    without_init();
    views_refused();
    wrong_configs();
    EXPECT(sp_init(&config), 0);
    EXPECT(sp_init(&config), -EALREADY);
    EXPECT(memcmp(sp_control.magic, SP_CONTROL_MAGIC, sizeof sp_control.magic), 0);
    EXPECT(sp_thread_birth_role("x", NULL, 2), -EINVAL);
    EXPECT(sp_thread_birth("a name of sixteen"), -EINVAL);
    EXPECT(sp_thread_birth_group("main", "workers"), 0);
    EXPECT(sp_thread_birth("main"), -EALREADY);
    EXPECT(sp_set_priority(1), 0);
    EXPECT(sp_set_priority(2), -EINVAL);
    EXPECT(sp_park_end(), -EINVAL);
    EXPECT(sp_park_begin(), 0);
    EXPECT(sp_park_begin(), -EINVAL);
    EXPECT(sp_deactivate(), -EINVAL);
    EXPECT(sp_park_end(), 0);
    EXPECT(sp_deactivate(), 0);
    EXPECT(sp_activate(), 0);
    EXPECT(pthread_create(&thread, NULL, stranger, NULL), 0);
    EXPECT(pthread_join(thread, NULL), 0);
    requests();
    pid_t child = fork();
    if (child == 0)
        in_child();
    EXPECT(waitpid(child, &status, 0), child);
    EXPECT(status, 0);
    EXPECT(sp_thread_death(), 0);
    puts("contract: ok");
    return 0;
}
