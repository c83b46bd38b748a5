/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The rule: a thread that has to block at a request stays blocked until the patcher or the deadline has settled it, and
 * takes the transition before it runs any other code of the program. A parked or inactive thread counts as blocked: it
 * returns through this code. So the patcher can change the program at a moment at which no thread runs any of it.
 */
#define _GNU_SOURCE
#include "barrier.h"

#include <errno.h>
#include <stillpoint_view.h>
#include <string.h>
#include <time.h>

/* Interval at which a blocked thread checks the request by itself, in case the program's callback delays the library's thread. */
#define LOOK_NS 50000000u

uint32_t sp_request_bell;
__thread uint32_t sp_request_seen __attribute__((tls_model("initial-exec")));

static pthread_cond_t settled;
/* The request of the present answer, as it was when first read completely. */
static struct sp_request current;
/* Number of the last request whose end was reported. */
static uint32_t told;
/* Bit mask of priorities of which a thread has passed its point since the awaited threads were last counted; and the
 * number of the request of that count. */
static uint32_t passed, counted;

/* Callbacks to make after the lock is released. */
struct news {
    bool migrated;
    bool ended;
    bool released;
    uint32_t taken;
    uint32_t transition;
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int sp_barrier_init(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    int error = pthread_cond_init(&settled, &attributes);
    pthread_condattr_destroy(&attributes);
    return -error;
}

static enum sp_outcome outcome(void)
{
    return (enum sp_outcome)__atomic_load_n(&sp_control.answer.outcome, __ATOMIC_SEQ_CST);
}

void sp_barrier_forked(void)
{
    sp_barrier_init();
    /* the request was made to the parent */
    if (outcome() == SP_GATHERING)
        __atomic_store_n(&sp_control.answer.outcome, SP_ABANDONED, __ATOMIC_SEQ_CST);
    told = sp_control.answer.number;
}

/* Reads the request that the bell announces; false while it is incomplete. */
static bool refresh(void)
{
    struct sp_request read;
    memcpy(&read, (const void *)&sp_control.request, sizeof read);
    if (read.number == 0 || read.number != sp_bell() || read.check != sp_request_check(&read) ||
        read.number != sp_control.answer.number)
        return false;
    current = read;
    return true;
}

static bool in_group(const struct sp_slot *slot)
{
    return strncmp(slot->group, current.group, SP_NAME_MAX) == 0;
}

/* Returns true if a thread changes together with others at this request. */
static bool together(const struct sp_slot *slot)
{
    return current.mode == SP_GLOBAL || (current.mode == SP_GROUP && in_group(slot));
}

/* Returns true if a thread has the code of this request, from this request or an earlier one. */
static bool has_taken(const struct sp_slot *slot)
{
    return current.generation ? slot->generation == current.generation : slot->transition == current.transition;
}

/* Returns true if the request still waits for a thread. */
static bool awaited(const struct sp_slot *slot)
{
    if (sp_state_get(slot) != SP_ACTIVE)
        return false;
    return together(slot) || (!has_taken(slot) && !(current.mode == SP_OTHERS && in_group(slot)));
}

/* Returns true if a thread of this priority must pass its point, as lower ones are awaited and may need it. Returns false if a
 * higher one is blocked already: then all lower ones were quiescent, and a thread that has returned since blocks at once, this
 * one and the others. If this one passed because of a thread that is about to block, it might wait for the higher one. */
static bool passes(uint32_t priority)
{
    bool lower = false;
    for (uint32_t i = 0; i < sp_control.slots_used; i++) {
        const struct sp_slot *slot = &sp_slots[i];
        enum sp_thread_state state = sp_state_get(slot);
        if (slot->priority > priority && together(slot) && state == SP_BLOCKED)
            return false;
        lower |= slot->priority < priority && together(slot) && state == SP_ACTIVE;
    }
    return lower;
}

/* Counts the awaited threads; returns the bit mask of priorities to wake: all of the threads that change one by one, and the
 * lowest of those that block together, as a higher one would pass its point. */
static uint32_t count_awaited(void)
{
    uint32_t single = 0, stands = 0, count = 0;
    for (uint32_t i = 0; i < sp_control.slots_used; i++) {
        const struct sp_slot *slot = &sp_slots[i];
        if (!awaited(slot))
            continue;
        count++;
        *(together(slot) ? &stands : &single) |= 1u << slot->priority;
    }
    sp_control.answer.awaited = count;
    sp_control.answer.awaited_priority = count ? (uint32_t)__builtin_ctz(single | stands) : 0;
    return single | (stands & -stands);
}

/* Abandons an overdue request; records a settled one, once; returns true if no thread needs a wake-up any more. The clock is
 * read first, and once. So an outcome that the patcher wrote before the deadline is read before the deadline is applied, and a
 * thread stops waiting for a deadline only after it has applied it. */
static bool settle(struct news *news)
{
    bool overdue = now_ns() >= current.deadline_ns;
    /* A parked thread has not seen a local request, and would not know its end. A word that is stored late does no harm; a
     * generation must not be entered late. */
    bool ends = current.mode == SP_GROUP || current.mode == SP_GLOBAL || current.generation;
    if (outcome() == SP_GATHERING && overdue && ends)
        __atomic_store_n(&sp_control.answer.outcome, SP_ABANDONED, __ATOMIC_SEQ_CST);
    if (outcome() == SP_GATHERING)
        return overdue;
    if (told == current.number)
        return true;
    told = current.number;
    pthread_cond_broadcast(&settled);
    if (current.mode == SP_OTHERS && outcome() == SP_RELEASED)
        return true; /* the first half of a group's request */
    news->ended = true;
    news->released = outcome() == SP_RELEASED;
    news->transition = current.transition;
    return true;
}

static uint32_t *word(void)
{
    return (uint32_t *)(void *)(sp_thread_pointer() + current.word_offset);
}

/* Stores the current transition. Numbers of transitions rise. A thread that was parked may get here after the patcher has
 * stored a later one, and that may happen between any two instructions here. */
static void raise_to_current(uint32_t *word)
{
    uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
    while ((int32_t)(current.transition - old) > 0 &&
           !__atomic_compare_exchange_n(word, &old, current.transition, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* Enters the generation, unless it is the code of all threads by now: that is so after the release of its request, except in
 * the first half of a group's. Returns false if the kernel refuses: then the generation is about to become the code of all, or
 * there is none, and the next point decides. */
static bool go_there(void)
{
    bool commit_of_all = outcome() != SP_GATHERING && current.mode != SP_OTHERS;
    return commit_of_all || sp_view_enter((int)current.generation) >= 0;
}

static void take(struct news *news)
{
    news->migrated = !has_taken(sp_own);
    news->taken = current.transition;
    if (!current.generation) {
        raise_to_current(word());
        sp_own->transition = current.transition;
    } else if (go_there()) {
        sp_own->generation = current.generation;
    } else {
        news->migrated = false;
        /* it may sleep before its next point */
        passed |= 1u << sp_own->priority;
        if (outcome() == SP_GATHERING)
            return;
    }
    sp_request_seen = current.number;
}

/* Rolls a thread back that was created during the request: it took the request before it registered in its group. */
static void undo_birth(void)
{
    uint32_t early = current.transition;
    if (current.generation && current.mode != SP_GLOBAL)
        sp_view_enter(0);
    else if (!current.generation)
        __atomic_compare_exchange_n(word(), &early, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

static void tell(const struct news *news)
{
    const struct sp_config *config = &sp_config;
    if (news->migrated && config->thread_migrated)
        config->thread_migrated(sp_own->name, news->taken, config->data);
    if (news->released && config->patch_applied)
        config->patch_applied(news->transition, config->data);
    if (news->ended && config->patch_done)
        config->patch_done(news->transition, news->released ? 0 : -ETIMEDOUT, config->data);
}

static struct timespec from_ns(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

/* Blocks until the request is settled; the lock is held before and after. */
static void stand(struct news *news)
{
    uint32_t number = current.number;
    sp_state_set(sp_own, SP_BLOCKED);
    settle(news);
    while (refresh() && current.number == number && outcome() == SP_GATHERING) {
        uint64_t look = now_ns() + LOOK_NS;
        struct timespec until = from_ns(look < current.deadline_ns ? look : current.deadline_ns);
        sp_control.busy = 0;
        pthread_cond_timedwait(&settled, &sp_lock, &until);
        sp_control.busy = 1;
        if (refresh() && current.number == number)
            settle(news);
    }
    sp_state_set(sp_own, SP_ACTIVE);
}

/* Makes one step of handling the request; the lock is held. Returns true if another request has arrived meanwhile, which must
 * be handled before the thread runs any code of the program. */
static bool deal(struct news *news)
{
    if (!refresh() || sp_request_seen == current.number)
        return false;
    settle(news);
    if (current.mode != SP_LOCAL && in_group(sp_own) && outcome() == SP_GATHERING)
        undo_birth();
    if (together(sp_own) && outcome() == SP_GATHERING) {
        uint32_t number = current.number;
        if (passes(sp_own->priority)) {
            passed |= 1u << sp_own->priority;
            return false;
        }
        stand(news);
        if (!refresh())
            return false; /* the next one is incomplete, and is handled at the next point */
        if (current.number != number)
            return true;
    }
    if (outcome() == SP_ABANDONED || (current.mode == SP_OTHERS && in_group(sp_own)))
        sp_request_seen = current.number;
    else
        take(news);
    return false;
}

void sp_barrier_arrive(void)
{
    bool more;
    do {
        struct news news = {0};
        sp_lock_take();
        more = deal(&news);
        sp_lock_leave();
        tell(&news);
    } while (more);
}

bool sp_barrier_awaited(uint32_t *levels, uint32_t *again)
{
    bool pending = false;
    struct news news = {0};
    *levels = *again = 0;
    sp_lock_take();
    if (refresh()) {
        *again = counted == current.number ? passed : UINT32_MAX;
        counted = current.number;
        passed = 0;
        pending = !settle(&news);
        *levels = count_awaited();
    }
    sp_lock_leave();
    tell(&news);
    return pending;
}
