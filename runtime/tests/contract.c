/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * contract.c - what each call returns, in order and out of it; forks; a program that never calls sp_init
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

static void without_init(void)
{
    EXPECT(sp_thread_birth("early"), 0);
    EXPECT(sp_park_begin(), 0);
    EXPECT(sp_thread_death(), 0);
    sp_quiescence_point();
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

int main(void)
{
    struct sp_config config = {.size = sizeof config, .priorities = 2};
    pthread_t thread;
    int status;
    without_init();
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
    pid_t child = fork();
    if (child == 0)
        in_child();
    EXPECT(waitpid(child, &status, 0), child);
    EXPECT(status, 0);
    EXPECT(sp_thread_death(), 0);
    puts("contract: ok");
    return 0;
}
