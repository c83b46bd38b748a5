/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The rule: a request is released at a moment, under the lock, at which every thread that takes part in it is blocked
 * here, parked, or inactive; each of them takes the transition before it runs anything else of the program. So there
 * is no moment at which one thread runs old code and another new code. Abandoning happens under the same lock.
 */
#define _GNU_SOURCE
#include "barrier.h"

#include <errno.h>
#include <string.h>
#include <time.h>

uint32_t sp_request_bell;
__thread uint32_t sp_request_seen __attribute__((tls_model("initial-exec")));

static pthread_cond_t settled;
/* The request that the answer is about, as it was when it was first seen whole. */
static struct sp_request current;

/* What has to be told once the lock is released. */
struct news {
    bool migrated;
    bool released;
    bool abandoned;
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

void sp_barrier_forked(void)
{
    sp_barrier_init();
}

/* Takes note of the request behind the bell; false while it is not whole. */
static bool refresh(void)
{
    struct sp_request read;
    memcpy(&read, (const void *)&sp_control.request, sizeof read);
    if (read.number == 0 || read.number != sp_bell() || read.check != sp_request_check(&read))
        return false;
    if (read.number != current.number) {
        current = read;
        sp_control.answer = (struct sp_answer){.number = read.number, .outcome = SP_GATHERING};
    }
    return true;
}

/* Whether a thread changes together with others at this request. */
static bool together(const struct sp_slot *slot)
{
    return current.mode == SP_GLOBAL ||
           (current.mode == SP_GROUP && strncmp(slot->group, current.group, SP_NAME_MAX) == 0);
}

/* Counts who is awaited; `below`: of lower priority than this only. */
static uint32_t count_awaited(uint32_t below, uint32_t *lowest)
{
    uint32_t awaited = 0;
    for (uint32_t i = 0; i < sp_control.slots_used; i++) {
        const struct sp_slot *slot = &sp_slots[i];
        if (sp_state_get(slot) != SP_ACTIVE || slot->priority >= below || !together(slot))
            continue;
        if (awaited++ == 0 || slot->priority < *lowest)
            *lowest = slot->priority;
    }
    return awaited;
}

/* Releases or abandons the request if its time has come. */
static void settle(struct news *news)
{
    struct sp_answer *answer = &sp_control.answer;
    if (current.mode == SP_LOCAL || answer->outcome != SP_GATHERING)
        return;
    answer->awaited = count_awaited(SP_PRIORITIES_MAX, &answer->awaited_priority);
    if (answer->awaited == 0) {
        answer->outcome = SP_RELEASED;
        news->released = true;
    } else if (now_ns() >= current.deadline_ns) {
        answer->outcome = SP_ABANDONED;
        news->abandoned = true;
    } else {
        return;
    }
    news->transition = current.transition;
    pthread_cond_broadcast(&settled);
}

static void take(struct news *news)
{
    sp_word = current.transition;
    sp_own->transition = current.transition;
    sp_request_seen = current.number;
    news->migrated = true;
    news->transition = current.transition;
}

static void tell(const struct news *news)
{
    const struct sp_config *config = &sp_config;
    if (news->migrated && config->thread_migrated)
        config->thread_migrated(sp_own->name, news->transition, config->data);
    if (news->released && config->patch_applied)
        config->patch_applied(news->transition, config->data);
    if ((news->released || news->abandoned) && config->patch_done)
        config->patch_done(news->transition, news->abandoned ? -ETIMEDOUT : 0, config->data);
}

/* Waits until the request is settled; the lock is held on both sides. */
static void block(struct news *news)
{
    struct timespec deadline = {
        .tv_sec = (time_t)(current.deadline_ns / 1000000000u),
        .tv_nsec = (long)(current.deadline_ns % 1000000000u),
    };
    uint32_t number = current.number;
    sp_state_set(sp_own, SP_BLOCKED);
    settle(news);
    while (current.number == number && sp_control.answer.outcome == SP_GATHERING) {
        pthread_cond_timedwait(&settled, &sp_lock, &deadline);
        settle(news);
    }
    sp_state_set(sp_own, SP_ACTIVE);
}

/* One step towards having dealt with the request; the lock is held. */
static void deal(struct news *news)
{
    uint32_t lowest = 0;
    if (!refresh() || sp_request_seen == current.number)
        return;
    if (!together(sp_own)) {
        take(news);
        return;
    }
    settle(news);
    if (sp_control.answer.outcome == SP_GATHERING) {
        uint32_t number = current.number;
        if (count_awaited(sp_own->priority, &lowest) > 0)
            return;
        block(news);
        if (current.number != number)
            return; /* the next one is met at the next point */
    }
    if (sp_control.answer.outcome == SP_RELEASED)
        take(news);
    else
        sp_request_seen = current.number;
}

void sp_barrier_arrive(void)
{
    struct news news = {0};
    pthread_mutex_lock(&sp_lock);
    deal(&news);
    pthread_mutex_unlock(&sp_lock);
    tell(&news);
}

void sp_barrier_reconsider(void)
{
    struct news news = {0};
    pthread_mutex_lock(&sp_lock);
    if (refresh())
        settle(&news);
    pthread_mutex_unlock(&sp_lock);
    tell(&news);
}

int sp_barrier_awaited(void)
{
    int level = -1;
    struct news news = {0};
    pthread_mutex_lock(&sp_lock);
    if (refresh()) {
        settle(&news);
        if (current.mode != SP_LOCAL && sp_control.answer.outcome == SP_GATHERING)
            level = (int)sp_control.answer.awaited_priority;
    }
    pthread_mutex_unlock(&sp_lock);
    tell(&news);
    return level;
}
