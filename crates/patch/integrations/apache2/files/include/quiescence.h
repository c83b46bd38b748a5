/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * quiescence.h - registration of httpd's processes and threads with libstillpoint
 *
 * A listener that finds no idle worker closes connections that are only kept alive. So the listener blocks first, while
 * its workers go on; a worker never waits for it.
 */
#ifndef STILLPOINT_QUIESCENCE_H
#define STILLPOINT_QUIESCENCE_H

#include "stillpoint.h"

enum quiescence_role { QUIESCENCE_LISTENER, QUIESCENCE_WORKER, QUIESCENCE_MAIN, QUIESCENCE_ROLES };

/* All threads: those of one kind alone could not block, and the first process has to have the group as well. */
#define QUIESCENCE_WORKERS "workers"

/* Call it in the first process, before it makes others; again after a restart. No thread needs a wake-up: sleeping
 * threads are parked. After a failure all processes are probed. */
static inline void quiescence_init(void)
{
    struct sp_config config = {.size = sizeof(config), .priorities = QUIESCENCE_ROLES};
    sp_init(&config);
    sp_thread_birth_role("parent", QUIESCENCE_WORKERS, QUIESCENCE_MAIN);
}

/* Call it in a process that was just made: its one thread was born as that of the first process. */
static inline void quiescence_child(void)
{
    sp_thread_death();
    sp_thread_birth_role("main", QUIESCENCE_WORKERS, QUIESCENCE_MAIN);
}

#endif
