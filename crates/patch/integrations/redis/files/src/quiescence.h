/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * quiescence.h - registration of redis's threads with libstillpoint
 *
 * The main thread waits for the others: for the I/O threads whenever it has given them work, for the lazy freeing when
 * it evicts. So it blocks first, and a helper passes its points until it does.
 */
#ifndef STILLPOINT_QUIESCENCE_H
#define STILLPOINT_QUIESCENCE_H

#include <pthread.h>

#include "stillpoint.h"

enum quiescence_role { QUIESCENCE_MAIN, QUIESCENCE_HELPER, QUIESCENCE_ROLES };

/* Call it before any other thread starts, and after the process has gone to the background. No thread needs a wake-up:
 * sleeping threads are parked. */
static inline int quiescence_init(unsigned long (*thread_count)(void *data))
{
    struct sp_config config = {
        .size = sizeof(config), .priorities = QUIESCENCE_ROLES, .thread_count = thread_count};
    int error = sp_init(&config);
    return error ? error : sp_thread_birth("main");
}

/* Registers the calling thread, which has its name already; after a failure it is not registered, and is probed. */
static inline void quiescence_helper(const char *group)
{
    char name[SP_NAME_MAX] = "helper";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    sp_thread_birth_role(name, group, QUIESCENCE_HELPER);
}

#endif
