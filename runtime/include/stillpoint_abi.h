/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_abi.h - what a patcher and the library say to each other, in the memory of the patched program
 *
 * The patcher finds `sp_control` in the symbol table, checks magic, size and version, writes `request` (the bell must
 * not have been rung for an older request that has no answer yet), and then stores `request.number` to
 * `sp_request_bell`. A torn or stale request fails its check and is looked at again at the next point, so the writes
 * need not be atomic. The library answers in `answer`. All times are CLOCK_MONOTONIC nanoseconds.
 *
 * The patcher may die at any moment: a request that is not complete at its deadline is abandoned by the threads that
 * wait for it, and one that is complete needs nobody any more.
 */
#ifndef STILLPOINT_ABI_H
#define STILLPOINT_ABI_H

#include <stdint.h>

#include "stillpoint.h"

#define SP_CONTROL_MAGIC "STILLPOINT-CTRL"
#define SP_CONTROL_VERSION 1

/* How threads take a transition. */
enum sp_mode {
    SP_LOCAL = 1,
    SP_GROUP = 2,
    SP_GLOBAL = 3,
};

/* How a request stands. */
enum sp_outcome {
    SP_GATHERING = 0,
    /* Every thread that had to wait was waiting or parked at one moment, and none runs old code any more. Local
     * requests never get here: the patcher sees for itself when all words have changed. */
    SP_RELEASED = 1,
    /* The deadline passed first. No thread took the transition. */
    SP_ABANDONED = 2,
};

/* What a thread is doing. */
enum sp_thread_state {
    SP_FREE = 0,
    SP_ACTIVE = 1,
    SP_PARKED = 2,
    SP_INACTIVE = 3,
    SP_BLOCKED = 4,
};

struct sp_request {
    /* Never 0, never used before. */
    uint32_t number;
    /* What the thread's word becomes. */
    uint32_t transition;
    /* enum sp_mode. */
    uint32_t mode;
    int32_t patcher_pid;
    uint64_t deadline_ns;
    /* For SP_GROUP: the group that changes together; all other threads take it as SP_LOCAL. */
    char group[SP_NAME_MAX];
    /* sp_request_check() of all of the above. */
    uint64_t check;
};

struct sp_answer {
    /* Request that the rest is about. */
    uint32_t number;
    /* enum sp_outcome. */
    uint32_t outcome;
    /* Threads that are neither blocked nor parked, as last counted. */
    uint32_t awaited;
    /* Their lowest priority. */
    uint32_t awaited_priority;
};

struct sp_slot {
    /* enum sp_thread_state; SP_FREE slots hold nothing. */
    uint32_t state;
    int32_t tid;
    uint32_t priority;
    /* The thread's word, as the thread last set it. */
    uint32_t transition;
    char name[SP_NAME_MAX];
    char group[SP_NAME_MAX];
};

struct sp_control {
    char magic[16] __attribute__((aligned(8)));
    uint32_t size;
    uint32_t version;
    /* Of the thread's word, from the thread pointer. */
    int64_t word_offset;
    /* Address of `sp_request_bell`. */
    uint64_t bell;
    /* Address of the slots, of which the first `slots_used` may be in use. */
    uint64_t slots;
    uint32_t slot_size;
    uint32_t slots_used;
    /* Writing 8 bytes to this eventfd (pidfd_getfd(2)) makes the library call `wake`; -1 after a fork. */
    int32_t wake_fd;
    uint32_t priorities;
    struct sp_request request;
    struct sp_answer answer;
};

extern struct sp_control sp_control;

/* FNV-1a over the request without its check. */
static inline uint64_t sp_request_check(const struct sp_request *request)
{
    const unsigned char *at = (const unsigned char *)request;
    uint64_t hash = 0xcbf29ce484222325u;
    for (unsigned i = 0; i < __builtin_offsetof(struct sp_request, check); i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

#endif
