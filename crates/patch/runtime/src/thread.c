/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _GNU_SOURCE
#include "thread.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "barrier.h"

pthread_mutex_t sp_lock = PTHREAD_MUTEX_INITIALIZER;
struct sp_slot sp_slots[SP_THREADS_MAX];
__thread struct sp_slot *sp_own __attribute__((tls_model("initial-exec")));
__thread uint32_t sp_word __attribute__((tls_model("initial-exec")));

/* Lowest index of a possibly free slot: all slots below are in use. */
static uint32_t first_free;

static int set_name(char *to, const char *name)
{
    if (!name)
        name = "";
    if (strlen(name) >= SP_NAME_MAX)
        return -EINVAL;
    memset(to, 0, SP_NAME_MAX);
    memcpy(to, name, strlen(name));
    return 0;
}

static int take_slot(struct sp_slot **taken)
{
    for (uint32_t i = first_free; i < SP_THREADS_MAX; i++) {
        if (sp_state_get(&sp_slots[i]) != SP_FREE)
            continue;
        first_free = i + 1;
        if (sp_control.slots_used <= i)
            sp_control.slots_used = i + 1;
        *taken = &sp_slots[i];
        return 0;
    }
    return -ENOSPC;
}

int sp_thread_birth_role(const char *name, const char *group, unsigned priority)
{
    struct sp_slot prepared = {.tid = gettid()};
    if (!sp_ready)
        return 0;
    if (sp_own)
        return -EALREADY;
    if (set_name(prepared.name, name) || set_name(prepared.group, group) || priority >= sp_control.priorities)
        return -EINVAL;
    sp_lock_take();
    struct sp_slot *slot;
    int error = take_slot(&slot);
    if (!error) {
        slot->tid = prepared.tid;
        slot->priority = priority;
        slot->transition = slot->generation = 0;
        slot->thread_pointer = (uint64_t)(uintptr_t)sp_thread_pointer();
        memcpy(slot->name, prepared.name, SP_NAME_MAX);
        memcpy(slot->group, prepared.group, SP_NAME_MAX);
        sp_state_set(slot, SP_ACTIVE);
        sp_own = slot;
    }
    sp_lock_leave();
    if (error)
        return error;
    /* a reused stack may hold values of an ended thread, which could look like a handled request */
    sp_request_seen = 0;
    sp_barrier_arrive();
    return 0;
}

int sp_thread_birth_group(const char *name, const char *group)
{
    return sp_thread_birth_role(name, group, 0);
}

int sp_thread_birth(const char *name)
{
    return sp_thread_birth_group(name, NULL);
}

int sp_thread_death(void)
{
    if (!sp_ready)
        return 0;
    if (!sp_own)
        return -ESRCH;
    /* a thread that ends while parked returns first: otherwise the rest of it would run old code */
    if (sp_state_get(sp_own) != SP_ACTIVE) {
        sp_state_set(sp_own, SP_ACTIVE);
        if (sp_bell() != sp_request_seen)
            sp_barrier_arrive();
    }
    sp_lock_take();
    uint32_t index = (uint32_t)(sp_own - sp_slots);
    sp_state_set(sp_own, SP_FREE);
    sp_own = NULL;
    if (index < first_free)
        first_free = index;
    sp_lock_leave();
    return 0;
}

static int leave(enum sp_thread_state state)
{
    if (!sp_ready)
        return 0;
    if (!sp_own)
        return -ESRCH;
    if (sp_state_get(sp_own) != SP_ACTIVE)
        return -EINVAL;
    sp_state_set(sp_own, state);
    return 0;
}

/* Returns to ACTIVE: the state is stored before the bell is read, and the patcher reads the states after it has rung the
 * bell, so one of the two sees the other. */
static int enter(enum sp_thread_state state)
{
    if (!sp_ready)
        return 0;
    if (!sp_own)
        return -ESRCH;
    if (sp_state_get(sp_own) != state)
        return -EINVAL;
    sp_state_set(sp_own, SP_ACTIVE);
    if (sp_bell() != sp_request_seen)
        sp_barrier_arrive();
    return 0;
}

int sp_park_begin(void)
{
    return leave(SP_PARKED);
}

int sp_park_end(void)
{
    return enter(SP_PARKED);
}

int sp_deactivate(void)
{
    return leave(SP_INACTIVE);
}

int sp_activate(void)
{
    return enter(SP_INACTIVE);
}

int sp_set_priority(unsigned priority)
{
    if (!sp_ready)
        return 0;
    if (!sp_own)
        return -ESRCH;
    if (priority >= sp_control.priorities)
        return -EINVAL;
    sp_lock_take();
    sp_own->priority = priority;
    sp_lock_leave();
    return 0;
}

int sp_transition_pending(void)
{
    return sp_own && sp_bell() != sp_request_seen;
}

void sp_quiescence_slow(void)
{
    if (!sp_own) {
        /* an unregistered thread must not have this cost at every point */
        sp_request_seen = sp_bell();
        return;
    }
    sp_barrier_arrive();
}

void sp_thread_forked(void)
{
    pthread_mutex_init(&sp_lock, NULL);
    sp_control.busy = 0;
    for (uint32_t i = 0; i < sp_control.slots_used; i++)
        if (&sp_slots[i] != sp_own)
            sp_state_set(&sp_slots[i], SP_FREE);
    first_free = 0;
    if (sp_own)
        sp_own->tid = gettid();
}
