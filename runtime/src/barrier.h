/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * barrier.h - one request at a time: who takes it, who waits, when it is released or abandoned
 */
#ifndef SP_BARRIER_H
#define SP_BARRIER_H

#include "thread.h"

/* Makes waits use CLOCK_MONOTONIC. 0 or -errno. */
int sp_barrier_init(void);

/* Deals with the request that the bell tells of: takes it, waits for it, or leaves it for the next point. */
void sp_barrier_arrive(void);

/* A thread stopped being awaited (parked, deactivated, died) or changed its role: the request may be complete now. */
void sp_barrier_reconsider(void);

/* The priority whose threads should be woken now, or -1. */
int sp_barrier_awaited(void);

/* In a new process nobody waits. */
void sp_barrier_forked(void);

#endif
