/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * barrier.h - one request at a time: which threads take it, which block, when it is abandoned
 */
#ifndef SP_BARRIER_H
#define SP_BARRIER_H

#include "thread.h"

/* Makes waits use CLOCK_MONOTONIC. 0 or -errno. */
int sp_barrier_init(void);

/* Handles the request that the bell announces: takes it, blocks, or leaves it for the next point. */
void sp_barrier_arrive(void);

/* Checks if the request is settled, and notifies the blocked threads; returns true while it is not settled. `levels`: bit mask
 * of the priorities whose threads need a wake-up now. It may be empty now and not later: a thread still blocked at the previous
 * request will be awaited at this one. `again`: priorities that need another wake-up: a thread has passed its point since the
 * last call, as lower ones were awaited, and may sleep; all priorities if that call was about another request. */
bool sp_barrier_awaited(uint32_t *levels, uint32_t *again);

/* Resets the state after a fork: in the new process no thread is blocked, and no request is open. */
void sp_barrier_forked(void);

#endif
