/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_abi.h - the interface between a patcher and the library, in the memory of the patched program
 *
 * The patcher finds `sp_control` in the symbol table, checks magic, size and version, writes `answer` and `request`, and
 * then stores `request.number` to `sp_request_bell`. A torn or stale request fails its check and is read again at the
 * next point, so the writes need not be atomic. All times are CLOCK_MONOTONIC nanoseconds.
 *
 * Decision: threads that have to block at a request wait until `answer.outcome` differs from SP_GATHERING. The patcher
 * reads in the slots that they are blocked, stops the whole process for a moment, reads the slots again, makes its change
 * and writes the outcome. While the process is stopped and `busy` is 0, no thread is inside the library's lock, so this
 * is as if the patcher held the lock. The library itself only ever abandons a request, at the deadline.
 *
 * The patcher may die at any moment: a waiting thread leaves by itself at the deadline.
 */
#ifndef STILLPOINT_ABI_H
#define STILLPOINT_ABI_H

#include <stdint.h>

#include "stillpoint.h"

#define SP_CONTROL_MAGIC "STILLPOINT-CTRL"
#define SP_CONTROL_VERSION 2

/* Mode in which threads take a transition. */
enum sp_mode {
    /* Each thread takes it at its next point. */
    SP_LOCAL = 1,
    /* The threads of one group block until all of them do; all others as SP_LOCAL. */
    SP_GROUP = 2,
    /* All threads block until all do. */
    SP_GLOBAL = 3,
    /* As SP_LOCAL, except for the threads of one group, which pass without taking it. */
    SP_OTHERS = 4,
};

/* State of a request. */
enum sp_outcome {
    SP_GATHERING = 0,
    /* The patcher has seen every thread where it had to be: blocked threads take the transition and continue. */
    SP_RELEASED = 1,
    /* No thread takes it any more; blocked threads continue as before. */
    SP_ABANDONED = 2,
};

/* State of a thread. */
enum sp_thread_state {
    SP_FREE = 0,
    SP_ACTIVE = 1,
    SP_PARKED = 2,
    SP_INACTIVE = 3,
    /* Blocked at a request. */
    SP_BLOCKED = 4,
};

struct sp_request {
    /* Unique, never 0. */
    uint32_t number;
    /* New value of the thread's word, unless that is higher already; above those of all earlier requests. */
    uint32_t transition;
    /* enum sp_mode. */
    uint32_t mode;
    int32_t patcher_pid;
    uint64_t deadline_ns;
    /* Offset of the thread's word from the thread pointer: `sp_control.word_offset`, or another word that the patcher
     * used before the library was loaded. */
    int64_t word_offset;
    /* Name of the group for SP_GROUP and SP_OTHERS. */
    char group[SP_NAME_MAX];
    /* The address-space generation with the new code (asgen(2)): a thread enters it, and its word does not change. 0 if the
     * word decides. */
    uint32_t generation;
    /* Zero. */
    uint32_t reserved;
    /* sp_request_check() of all of the above. */
    uint64_t check;
};

struct sp_answer {
    /* Number of the request that the other fields are about. */
    uint32_t number;
    /* enum sp_outcome. */
    uint32_t outcome;
    /* Number of threads that the request still waits for, at the last count. */
    uint32_t awaited;
    /* Lowest priority of these threads. */
    uint32_t awaited_priority;
};

struct sp_slot {
    /* enum sp_thread_state; SP_FREE slots hold nothing. */
    uint32_t state;
    /* Thread id in the process's own PID namespace. */
    int32_t tid;
    uint32_t priority;
    /* Last transition that the thread took from a request without a generation. */
    uint32_t transition;
    uint64_t thread_pointer;
    char name[SP_NAME_MAX];
    char group[SP_NAME_MAX];
    /* Last generation that it took: the kernel never uses a number twice in a process. */
    uint32_t generation;
    uint32_t reserved;
};

struct sp_control {
    char magic[16] __attribute__((aligned(8)));
    uint32_t size;
    uint32_t version;
    /* Offset of the thread's word from the thread pointer. */
    int64_t word_offset;
    /* Address of `sp_request_bell`. */
    uint64_t bell;
    /* Address of the slots, of which the first `slots_used` may be in use. */
    uint64_t slots;
    uint32_t slot_size;
    uint32_t slots_used;
    /* Writing 8 bytes to this eventfd (pidfd_getfd(2)) makes the library check at once, and call `wake`; -1 after a fork. */
    int32_t wake_fd;
    /* 0 until sp_init(): a library that is only preloaded has no registered threads. */
    uint32_t priorities;
    /* Not 0 while a thread is inside the library's lock. */
    uint32_t busy;
    /* Result of `thread_count` at the last request; 0 if there is none. */
    uint32_t program_threads;
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
