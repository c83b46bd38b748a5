/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * quiescence.h - registration of smbd's processes and threads with libstillpoint
 *
 * The main thread of a process gives jobs to a pool of threads, and looks for their results in its event loop. No thread
 * of the pool waits for it: these block first.
 */
#ifndef STILLPOINT_QUIESCENCE_H
#define STILLPOINT_QUIESCENCE_H

#include <tevent.h>

#include "stillpoint.h"

enum quiescence_role { QUIESCENCE_POOL, QUIESCENCE_LOOP, QUIESCENCE_ROLES };

#define QUIESCENCE_LOOPS "loops"

/* Call it in the first process, before it makes others. After a failure all processes are probed. */
void quiescence_init(void);

/* Call them at the begin and at the end of a callback for traces of the main thread's event context: asleep in its outer
 * loop it is parked. */
void quiescence_awake(enum tevent_trace_point point);
void quiescence_asleep(enum tevent_trace_point point);

#endif
