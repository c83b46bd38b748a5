/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint.h - quiescence points for programs that are patched while they run
 *
 * A thread announces places where it holds no state of old code: at such a quiescence point it may take new code. Three
 * modes exist: local (each thread by itself, never blocks), group (the threads of a group change together) and global
 * (all threads change together). The patcher chooses the mode; the program is written once. Follows WfPatch (OSDI'20,
 * section 3.3) and the priority-based global quiescence of "The Case for DBMS Live Patching" (VLDB'25, section 5.2).
 *
 * The library never exits, prints or signals, allocates nothing after sp_init(), and returns 0 or -errno. Every call
 * is thread-safe; none may be made from a signal handler. In a program that is never patched, a point costs two loads
 * and a branch.
 */
#ifndef STILLPOINT_H
#define STILLPOINT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Limit of threads registered at the same time; slots are reused. */
#define SP_THREADS_MAX 65536
/* Priorities are 0 (blocks first) to SP_PRIORITIES_MAX - 1 (blocks last). */
#define SP_PRIORITIES_MAX 8
/* Size of a thread's or group's name in bytes, with the terminating zero. */
#define SP_NAME_MAX 16

/* Configuration of a program. Zero it, set `size` and the fields that are needed. */
struct sp_config {
    /* sizeof(struct sp_config). */
    size_t size;
    /* Number of priorities in use; 0 means 1. */
    unsigned priorities;
    /* Wakes sleeping threads of priority `level`, so that they reach a point; called from the library's own thread.
     * Called again, after a pause, for as long as it returns non-zero and threads of the level are awaited. */
    int (*wake)(unsigned level, void *data);
    /* Returns the program's own count of its threads; `stillpoint patch status` compares it with the registered ones. */
    unsigned long (*thread_count)(void *data);
    /* Reports that this thread has taken the code of a transition. Called by the thread itself, at its point. */
    void (*thread_migrated)(const char *name, uint32_t transition, void *data);
    /* Reports that a request has been released: no thread runs old code any more. Called once. */
    void (*patch_applied)(uint32_t transition, void *data);
    /* Reports that the request has ended: 0, or -ETIMEDOUT when it was abandoned. Called once. */
    void (*patch_done)(uint32_t transition, int result, void *data);
    /* Argument of every callback. */
    void *data;
    /* Zero. */
    uint64_t reserved[4];
};

/* Initialises the library. Returns 0; -EINVAL for an invalid config; -EALREADY when called before; -errno of
 * eventfd(2) or pthread_create(3). Without it every other call returns 0 and does nothing. */
int sp_init(const struct sp_config *config);

/* Registers the calling thread, which takes a pending transition at once. Returns 0; -EALREADY; -ENOSPC;
 * -EINVAL for a name that is too long. A null group means none. */
int sp_thread_birth(const char *name);
int sp_thread_birth_group(const char *name, const char *group);
/* Registers the calling thread with a priority from the start: a thread that serves awaited threads must not block
 * before it has set its priority. Returns -EINVAL also for a priority outside of the config of sp_init(). */
int sp_thread_birth_role(const char *name, const char *group, unsigned priority);

/* Unregisters the calling thread. Returns 0, or -ESRCH when it was not registered. */
int sp_thread_death(void);

/* Bracket a wait in which the thread holds no state of old code: between them it counts as quiescent and needs no
 * wake-up. The end takes a transition, and blocks where a point would. Not nested. 0; -ESRCH; -EINVAL out of order. */
int sp_park_begin(void);
int sp_park_end(void);

/* Sets the role of the calling thread: at a group or global request it blocks only after all participating threads of
 * lower priority have. Returns 0; -ESRCH; -EINVAL. */
int sp_set_priority(unsigned priority);

/* Switch the waiting for the calling thread off and on. A deactivated thread promises to run none of the program's code
 * that could be patched until it is activated again, which blocks where a point would. 0; -ESRCH; -EINVAL out of order. */
int sp_deactivate(void);
int sp_activate(void);

/* Returns 1 if the calling thread has a request to handle at its next point, otherwise 0. */
int sp_transition_pending(void);

/* For sp_quiescence_point() only. */
void sp_quiescence_slow(void);
extern uint32_t sp_request_bell;
extern __thread uint32_t sp_request_seen __attribute__((tls_model("initial-exec")));

/* Marks a place at which the calling thread holds no state of old code. */
static inline void sp_quiescence_point(void)
{
    if (__builtin_expect(__atomic_load_n(&sp_request_bell, __ATOMIC_RELAXED) != sp_request_seen, 0))
        sp_quiescence_slow();
}

#ifdef __cplusplus
}
#endif
#endif
