/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * quiescence.h - registration of memcached's threads with libstillpoint
 *
 * Waits between threads: the maintenance of the hash table, and the listener at shutdown, wait until every worker has
 * reported; a thread that starts a helper waits until the helper runs. So they block in this order, and a thread passes
 * its points until those before it are blocked. No thread blocks with a lock that another thread takes.
 */
#ifndef STILLPOINT_QUIESCENCE_H
#define STILLPOINT_QUIESCENCE_H

#include "stillpoint.h"

enum quiescence_role { QUIESCENCE_COORDINATOR, QUIESCENCE_WORKER, QUIESCENCE_HELPER, QUIESCENCE_ROLES };

/* Workers, and threads that wait for all of them: a group of workers alone could block while half of them are paused. */
#define QUIESCENCE_WORKERS "workers"

/* Registers the calling thread; after a failure it is not registered, and is probed. */
static inline void quiescence_birth(const char *name, const char *group, enum quiescence_role role)
{
    sp_thread_birth_role(name, group, role);
}

/* Makes every worker's event loop turn once. */
void quiescence_wake_workers(void);

#endif
