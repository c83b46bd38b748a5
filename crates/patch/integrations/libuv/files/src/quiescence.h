/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * quiescence.h - registration of the threads of libuv with libstillpoint
 *
 * A thread takes part while it runs an event loop; so does each thread of the pool. All have one priority: a loop does
 * not wait for the pool, and the pool waits for no loop. A loop that runs inside a callback of another one has code of
 * libuv below it on the stack: its thread is not quiescent there.
 */
#ifndef STILLPOINT_QUIESCENCE_H
#define STILLPOINT_QUIESCENCE_H

#include "stillpoint.h"

/* Bracket a run of an event loop. The first one of the process initialises the library. */
void quiescence_loop_enter(void);
void quiescence_loop_leave(void);

/* Bracket the sleep of an event loop; errno is kept. */
void quiescence_sleep_begin(void);
void quiescence_sleep_end(void);

#endif
