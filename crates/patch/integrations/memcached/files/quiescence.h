/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * quiescence.h - what memcached's threads tell libstillpoint of themselves
 *
 * Who waits for whom: the maintenance of the hash table, and the listener at shutdown, wait until every worker has
 * reported; whoever starts a helper waits until it is there. So they stand in this order, and a thread passes its
 * points until those before it stand. Nobody stands with a lock that another thread takes.
 */
#ifndef STILLPOINT_QUIESCENCE_H
#define STILLPOINT_QUIESCENCE_H

#include "stillpoint.h"

enum quiescence_role { QUIESCENCE_COORDINATOR, QUIESCENCE_WORKER, QUIESCENCE_HELPER, QUIESCENCE_ROLES };

/* Workers, and those who wait for all of them: a group of workers alone could stand while half of them are paused. */
#define QUIESCENCE_WORKERS "workers"

/* What fails here leaves a thread that takes no part: it is probed. */
static inline void quiescence_birth(const char *name, const char *group, enum quiescence_role role)
{
    sp_thread_birth_role(name, group, role);
}

/* Makes every worker's event loop turn once. */
void quiescence_wake_workers(void);

#endif
