/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * barrier.h - one request at a time: who takes it, who stands, when it is abandoned
 */
#ifndef SP_BARRIER_H
#define SP_BARRIER_H

#include "thread.h"

/* Makes waits use CLOCK_MONOTONIC. 0 or -errno. */
int sp_barrier_init(void);

/* Deals with the request that the bell tells of: takes it, stands, or leaves it for the next point. */
void sp_barrier_arrive(void);

/* Looks whether the request is settled, and lets those who stand know; true while it is not. `levels`: whose threads should be
 * woken now, bit by bit. There may be none and some later: whoever still stands at the request before will be awaited at this
 * one. `again`: levels that were woken in vain: a thread has passed its point since the last call, for lower ones were awaited,
 * and may sleep; all of them where that call was about another request. */
bool sp_barrier_awaited(uint32_t *levels, uint32_t *again);

/* In a new process nobody stands, and nobody is asked. */
void sp_barrier_forked(void);

#endif
