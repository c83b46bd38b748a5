/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * quiescence.h - registration of slapd's threads with libstillpoint
 *
 * Waits between threads: a worker that sends to a slow client waits for a listener to see that it reads again, so
 * workers block first. A worker that pauses the pool waits until all others are idle: one that blocks counts as idle.
 */
#ifndef STILLPOINT_QUIESCENCE_H
#define STILLPOINT_QUIESCENCE_H

#include "stillpoint.h"

enum quiescence_role { QUIESCENCE_WORKER, QUIESCENCE_LISTENER, QUIESCENCE_MAIN, QUIESCENCE_ROLES };

/* Call it before the listeners start, and after the process has gone to the background. No thread needs a wake-up:
 * sleeping threads are parked. */
static inline int quiescence_init(void)
{
    struct sp_config config = {.size = sizeof(config), .priorities = QUIESCENCE_ROLES};
    int error = sp_init(&config);
    return error ? error : sp_thread_birth_role("main", 0, QUIESCENCE_MAIN);
}

#endif
