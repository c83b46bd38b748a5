/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * thread.h - the registered threads: their slots, and the one lock that guards everything except a slot's own state
 */
#ifndef SP_THREAD_H
#define SP_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "stillpoint_abi.h"

/* Guards the slots (except `state` of the thread's own slot between points), request handling and the answer. */
extern pthread_mutex_t sp_lock;
extern struct sp_slot sp_slots[SP_THREADS_MAX];
extern struct sp_config sp_config;
extern bool sp_ready;

/* Slot of the calling thread; null if the thread is not registered. */
extern __thread struct sp_slot *sp_own __attribute__((tls_model("initial-exec")));
/* The word that trampolines compare. */
extern __thread uint32_t sp_word __attribute__((tls_model("initial-exec")));

static inline void sp_state_set(struct sp_slot *slot, enum sp_thread_state state)
{
    __atomic_store_n(&slot->state, state, __ATOMIC_SEQ_CST);
}

static inline enum sp_thread_state sp_state_get(const struct sp_slot *slot)
{
    return (enum sp_thread_state)__atomic_load_n(&slot->state, __ATOMIC_SEQ_CST);
}

static inline char *sp_thread_pointer(void)
{
    char *thread_pointer;
    __asm__("movq %%fs:0, %0" : "=r"(thread_pointer));
    return thread_pointer;
}

static inline uint32_t sp_bell(void)
{
    return __atomic_load_n(&sp_request_bell, __ATOMIC_SEQ_CST);
}

static inline void sp_lock_take(void)
{
    pthread_mutex_lock(&sp_lock);
    sp_control.busy = 1;
}

static inline void sp_lock_leave(void)
{
    sp_control.busy = 0;
    pthread_mutex_unlock(&sp_lock);
}

/* Resets the slots after a fork: in the new process only the calling thread exists. */
void sp_thread_forked(void);

#endif
