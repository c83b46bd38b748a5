/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_abi.h - what a patcher and the library say to each other, in the memory of the patched program
 *
 * The patcher finds `sp_control` in the symbol table, checks magic, size and version, writes `answer` and `request`, and
 * then stores `request.number` to `sp_request_bell`. A torn or stale request fails its check and is looked at again at
 * the next point, so the writes need not be atomic. All times are CLOCK_MONOTONIC nanoseconds.
 *
 * Who decides: threads that have to stand at a request wait until `answer.outcome` is another than SP_GATHERING. The
 * patcher sees in the slots that they stand, stops the whole process for a moment, sees it again, makes its change and
 * writes the outcome; while the process stands and `busy` is 0 nobody is in the middle of anything, so that this is as
 * if the patcher held the library's lock. The library itself only ever abandons, at the deadline.
 *
 * The patcher may die at any moment: whoever waits leaves by itself at the deadline.
 */
#ifndef STILLPOINT_ABI_H
#define STILLPOINT_ABI_H

#include <stdint.h>

#include "stillpoint.h"

#define SP_CONTROL_MAGIC "STILLPOINT-CTRL"
#define SP_CONTROL_VERSION 2

/* How threads take a transition. */
enum sp_mode {
    /* Each at its next point. */
    SP_LOCAL = 1,
    /* The threads of one group stand until all of them do; all others as SP_LOCAL. */
    SP_GROUP = 2,
    /* All stand until all do. */
    SP_GLOBAL = 3,
    /* As SP_LOCAL, but for the threads of one group, which pass by. */
    SP_OTHERS = 4,
};

/* How a request stands. */
enum sp_outcome {
    SP_GATHERING = 0,
    /* The patcher has seen everybody where it had to be: those who stand take the transition and go on. */
    SP_RELEASED = 1,
    /* Nobody takes it any more; those who stand go on as before. */
    SP_ABANDONED = 2,
};

/* What a thread is doing. */
enum sp_thread_state {
    SP_FREE = 0,
    SP_ACTIVE = 1,
    SP_PARKED = 2,
    SP_INACTIVE = 3,
    /* Stands at a request. */
    SP_BLOCKED = 4,
};

struct sp_request {
    /* Never 0, never used before. */
    uint32_t number;
    /* What the thread's word becomes, unless it holds more already: above those of all earlier requests. */
    uint32_t transition;
    /* enum sp_mode. */
    uint32_t mode;
    int32_t patcher_pid;
    uint64_t deadline_ns;
    /* Where the thread's word lies, from the thread pointer: `sp_control.word_offset`, or another word that the patcher
     * began with before the library was there. */
    int64_t word_offset;
    /* For SP_GROUP and SP_OTHERS. */
    char group[SP_NAME_MAX];
    /* The address-space generation in which the new code is (asgen(2)): a thread goes there, and its word stays as it is. 0
     * where the word decides. */
    uint32_t generation;
    /* 0. */
    uint32_t reserved;
    /* sp_request_check() of all of the above. */
    uint64_t check;
};

struct sp_answer {
    /* Request that the rest is about. */
    uint32_t number;
    /* enum sp_outcome. */
    uint32_t outcome;
    /* Threads that have not done their part yet, as last counted. */
    uint32_t awaited;
    /* Their lowest priority. */
    uint32_t awaited_priority;
};

struct sp_slot {
    /* enum sp_thread_state; SP_FREE slots hold nothing. */
    uint32_t state;
    /* In the process's own PID namespace. */
    int32_t tid;
    uint32_t priority;
    /* What the thread last took of requests without a generation. */
    uint32_t transition;
    uint64_t thread_pointer;
    char name[SP_NAME_MAX];
    char group[SP_NAME_MAX];
    /* What it last took of those with one: the kernel never uses a number twice in a process. */
    uint32_t generation;
    uint32_t reserved;
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
    /* Writing 8 bytes to this eventfd (pidfd_getfd(2)) makes the library look at once, and call `wake`; -1 after a fork. */
    int32_t wake_fd;
    /* 0 until sp_init(): a library that was only preloaded knows no threads. */
    uint32_t priorities;
    /* Not 0 while a thread is inside the library's lock. */
    uint32_t busy;
    /* What `thread_count` said at the last request; 0 for nothing. */
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
