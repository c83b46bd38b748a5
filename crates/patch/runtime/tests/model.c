/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * model.c - random threads, roles, parking, starts and ends of threads, with random requests
 *
 * Conditions: at a global request no thread runs new code while another runs old code; at a group request the same
 * among the group's threads; an abandoned request changes no thread; every request is settled, and released unless its
 * patcher dies or gave it almost no time.
 * A thread "runs code" between two points: at the start it records the version that its word, or its generation, selects. At the
 * end it checks that no thread that changes together with it ran another version meanwhile. The model simulates the kernel's
 * part of a generation: `enter` replaces the system call.
 *
 * No time-out hides a dead-lock or a lost wake-up: threads sleep, without a limit, until the library's `wake` is called, ask the
 * listener (a thread of the highest priority) and wait for its answer, or stay parked until the request is over.
 *
 * usage: model [SEED [REQUESTS]]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stillpoint_view.h"
#include "thread.h"

#define THREADS 12
#define PRIORITIES 3
/* Priority of the listener: it blocks last. */
#define LISTENER (PRIORITIES - 1)
#define FIRST 1001u
/* Time limit of a step; a thread that reaches it shows a dead-lock or a lost wake-up. */
#define LONG_NS 120000000000u
/* Time limit of a request that only its release may settle. */
#define NO_LIMIT_NS (10 * LONG_NS)

static atomic_bool stop;

/* Lock and condition with which threads wait for each other. */
static pthread_mutex_t desk = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
/* Numbers: calls of `wake` for each priority; completed requests; questions to the listener, and answered ones. */
static unsigned woken[PRIORITIES], settled, asked, answered;

/* State of a waiting thread, for the report of a dead-lock. */
enum wait { RUNS, SLEEPS, STAYS_PARKED, ASKS, ASKS_PARKED, WAITS };
static const char *const WAITS_FOR[] = {"runs",
                                        "sleeps until it is woken",
                                        "is parked until the request is over",
                                        "waits for the listener's answer",
                                        "is parked until the listener's answer",
                                        "listens until it is asked or woken"};
static _Atomic(enum wait) doing[THREADS];
static atomic_int tids[THREADS];
static atomic_ulong times[sizeof WAITS_FOR / sizeof *WAITS_FOR];

/* Threads now running code of each side of a transition, per set (0 all, 1 group "a"). Each transition has a row of its
 * own: while requests are abandoned, a thread that gets no processor lags behind by any number of them. */
static atomic_int (*running)[2][2];
/* Present transition and mode, in one word so that no thread reads halves of two: transition * 4 + mode. */
static atomic_uint question;
/* The last transition whose release was written: from then on every thread runs its code, for any value in the word of a
 * thread that was parked meanwhile. Like the state byte of the patcher's trampolines. */
static atomic_uint committed;
static atomic_ulong steps, migrations, applied, done, births, refusals;
/* The generation that this thread is in. */
static __thread unsigned there;

static void fail(const char *what)
{
    fprintf(stderr, "model: %s\n", what);
    abort();
}

static unsigned next(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    /* the low bits of such a sequence repeat soon, and with them the sequence of random choices */
    return (*seed ^ *seed >> 15) * 2654435761u >> 8;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Returns the generation of a transition: every second one uses a generation, of the same number. */
static uint32_t generation_of(uint32_t transition)
{
    return transition % 2 ? transition : 0;
}

/* Replaces sp_view_enter(), by --wrap: refuses a generation that has become the text of all and is gone. At a local request,
 * where threads entered it one by one, that may happen before the release is written: now and then. */
int __wrap_sp_view_enter(int view);
int __wrap_sp_view_enter(int view)
{
    static __thread unsigned seed;
    if (seed == 0)
        seed = (unsigned)gettid();
    int before = (int)there;
    if (view != 0 && (unsigned)view == atomic_load(&committed))
        return -ESRCH;
    /* the lock is held */
    bool gone = sp_control.answer.outcome == SP_GATHERING && sp_control.request.mode == SP_LOCAL && next(&seed) % 4 == 0;
    if (view != 0 && gone) {
        atomic_fetch_add(&refusals, 1);
        return -EBUSY;
    }
    there = (unsigned)view;
    return before;
}

/* Returns true if this thread runs the code of a transition. */
static bool is_over(uint32_t transition)
{
    return atomic_load(&committed) == transition ||
           (generation_of(transition) ? there == transition : sp_word == transition);
}

/* Runs one piece of the program's work, on one version from beginning to end. */
static void run_code(unsigned *seed, bool in_group)
{
    uint32_t asked = atomic_load(&question), transition = asked / 4, mode = asked % 4;
    int side = is_over(transition);
    bool counted[2] = {mode == SP_GLOBAL, mode == SP_GROUP && in_group};
    for (int set = 0; set < 2; set++) {
        if (!counted[set])
            continue;
        /* enter, then check: of two threads with different versions the later one sees the other */
        atomic_fetch_add(&running[transition - FIRST][set][side], 1);
        if (atomic_load(&running[transition - FIRST][set][!side]) != 0)
            fail("two versions run at the same time");
    }
    for (unsigned i = next(seed) % 200; i > 0; i--)
        __asm__ volatile("" ::: "memory");
    if (next(seed) % 16 == 0)
        sched_yield();
    for (int set = 0; set < 2; set++)
        if (counted[set])
            atomic_fetch_sub(&running[transition - FIRST][set][side], 1);
    atomic_fetch_add(&steps, 1);
}

static void sleep_us(unsigned us)
{
    struct timespec pause = {.tv_nsec = us * 1000L};
    nanosleep(&pause, NULL);
}

struct role {
    unsigned number;
    unsigned seed;
    unsigned priority;
    bool in_group;
};

static unsigned read_at_desk(const unsigned *count)
{
    pthread_mutex_lock(&desk);
    unsigned read = *count;
    pthread_mutex_unlock(&desk);
    return read;
}

/* Waits until the count differs from `was`; without any limit. */
static void await_change(struct role *role, enum wait what, const unsigned *count, unsigned was)
{
    pthread_mutex_lock(&desk);
    atomic_store(&doing[role->number], what);
    atomic_fetch_add(&times[what], 1);
    while (*count == was && !atomic_load(&stop))
        pthread_cond_wait(&news, &desk);
    atomic_store(&doing[role->number], RUNS);
    pthread_mutex_unlock(&desk);
}

static void park(void)
{
    if (sp_park_begin())
        fail("park begin");
}

static void come_back(void)
{
    if (sp_park_end())
        fail("park end");
}

/* Waits for an answer of the listener, which blocks after all threads that may ask. */
static void ask(struct role *role, bool parked)
{
    if (parked)
        park();
    pthread_mutex_lock(&desk);
    unsigned mine = asked++;
    pthread_cond_broadcast(&news);
    enum wait what = parked ? ASKS_PARKED : ASKS;
    atomic_store(&doing[role->number], what);
    atomic_fetch_add(&times[what], 1);
    while ((int)(answered - mine) <= 0 && !atomic_load(&stop))
        pthread_cond_wait(&news, &desk);
    atomic_store(&doing[role->number], RUNS);
    pthread_mutex_unlock(&desk);
    if (parked)
        come_back();
}

/* Answers, and waits for the next question or a wake-up. The calls of `wake` are counted from before its last point on. */
static void *listen(void *argument)
{
    struct role *role = argument;
    atomic_store(&tids[role->number], gettid());
    if (sp_thread_birth_role("worker", role->in_group ? "a" : NULL, LISTENER))
        fail("birth");
    while (!atomic_load(&stop)) {
        unsigned before = read_at_desk(&woken[LISTENER]);
        sp_quiescence_point();
        run_code(&role->seed, role->in_group);
        bool parked = next(&role->seed) % 2;
        if (parked)
            park();
        pthread_mutex_lock(&desk);
        atomic_store(&doing[role->number], WAITS);
        atomic_fetch_add(&times[WAITS], 1);
        while (asked == answered && woken[LISTENER] == before && !atomic_load(&stop))
            pthread_cond_wait(&news, &desk);
        atomic_store(&doing[role->number], RUNS);
        pthread_mutex_unlock(&desk);
        /* it has no answer for waiting threads before it has returned */
        if (parked)
            come_back();
        else
            sp_quiescence_point();
        pthread_mutex_lock(&desk);
        answered = asked;
        pthread_cond_broadcast(&news);
        pthread_mutex_unlock(&desk);
    }
    if (sp_thread_death())
        fail("death");
    return NULL;
}

/* Makes one random action of a thread beside running code. */
static void now_and_then(struct role *role)
{
    unsigned *seed = &role->seed, before;
    switch (next(seed) % 128) {
    case 0:
        park();
        sleep_us(next(seed) % 300);
        come_back();
        break;
    case 1:
        if (sp_deactivate())
            fail("deactivate");
        sleep_us(next(seed) % 100);
        if (sp_activate())
            fail("activate");
        break;
    case 2:
        role->priority = next(seed) % PRIORITIES;
        if (sp_set_priority(role->priority))
            fail("priority");
        break;
    case 3:
        /* a thread that gets a wake-up between its point and its sleep does not sleep */
        before = read_at_desk(&woken[role->priority]);
        sp_quiescence_point();
        await_change(role, SLEEPS, &woken[role->priority], before);
        break;
    case 4:
        before = read_at_desk(&settled);
        park();
        await_change(role, STAYS_PARKED, &settled, before);
        come_back();
        break;
    case 5:
    case 6:
        if (role->priority < LISTENER)
            ask(role, next(seed) % 2);
        break;
    }
}

/* Runs for a while, then ends; `main` starts another in its place. */
static void *live(void *argument)
{
    struct role *role = argument;
    atomic_store(&tids[role->number], gettid());
    if (sp_thread_birth_group("worker", role->in_group ? "a" : NULL) || sp_set_priority(role->priority))
        fail("birth");
    atomic_fetch_add(&births, 1);
    for (unsigned life = 200 + next(&role->seed) % 3000; life > 0 && !atomic_load(&stop); life--) {
        run_code(&role->seed, role->in_group);
        sp_quiescence_point();
        now_and_then(role);
    }
    if (sp_thread_death())
        fail("death");
    return NULL;
}

/* Wakes all of the level and needs no other call, or wakes none and requests another call. */
static int wake(unsigned level, void *data)
{
    static unsigned seed = 1;
    (void)data;
    unsigned chance = next(&seed) % 4;
    if (chance == 0)
        return 1;
    pthread_mutex_lock(&desk);
    woken[level]++;
    pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&desk);
    return chance == 1;
}

static void tell_everybody(unsigned *count)
{
    pthread_mutex_lock(&desk);
    if (count)
        ++*count;
    pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&desk);
}

static void on_migrated(const char *name, uint32_t transition, void *data)
{
    (void)data;
    /* called after the lock was released: a later one may have been committed since */
    if (strcmp(name, "worker") != 0 || !(is_over(transition) || atomic_load(&committed) > transition))
        fail("callback with wrong arguments");
    atomic_fetch_add(&migrations, 1);
}

static void on_applied(uint32_t transition, void *data)
{
    (void)transition;
    (void)data;
    atomic_fetch_add(&applied, 1);
}

static void on_done(uint32_t transition, int result, void *data)
{
    (void)transition;
    (void)data;
    if (result != 0 && result != -ETIMEDOUT)
        fail("done with a result that does not exist");
    atomic_fetch_add(&done, 1);
}

static void ring(void)
{
    uint64_t one = 1;
    if (write(sp_control.wake_fd, &one, sizeof one) != sizeof one)
        fail("waking");
}

/* Does the work of `stillpoint patch` from outside; the lock represents its stop of the process. */
static uint64_t post(uint32_t number, uint32_t transition, uint32_t mode, uint64_t limit_ns)
{
    struct sp_request request = {
        .number = number,
        .transition = transition,
        .mode = mode,
        .patcher_pid = getpid(),
        .deadline_ns = now_ns() + limit_ns,
        .word_offset = sp_control.word_offset,
        .group = "a",
        .generation = generation_of(transition),
    };
    request.check = sp_request_check(&request);
    sp_lock_take();
    sp_control.answer = (struct sp_answer){.number = number};
    sp_control.request = request;
    sp_lock_leave();
    /* stored before any thread can take the new version */
    atomic_store(&question, transition * 4 + (mode == SP_OTHERS ? SP_GROUP : mode));
    __atomic_store_n(&sp_request_bell, number, __ATOMIC_SEQ_CST);
    ring();
    return request.deadline_ns;
}

static struct sp_answer answer(void)
{
    sp_lock_take();
    struct sp_answer read = sp_control.answer;
    sp_lock_leave();
    return read;
}

static bool has_taken(const struct sp_slot *slot, uint32_t transition)
{
    return (generation_of(transition) ? slot->generation : slot->transition) == transition;
}

static uint32_t slots_used(void)
{
    sp_lock_take();
    uint32_t used = sp_control.slots_used;
    sp_lock_leave();
    return used;
}

/* Returns true if a thread has done its part, from the view of the patcher, in the slots. */
static bool over(const struct sp_slot *slot, uint32_t transition, uint32_t mode)
{
    bool member = strcmp(slot->group, "a") == 0;
    if (sp_state_get(slot) != SP_ACTIVE || (mode == SP_OTHERS && member))
        return true;
    return mode != SP_GLOBAL && !(mode == SP_GROUP && member) && has_taken(slot, transition);
}

static bool all_over(uint32_t transition, uint32_t mode)
{
    for (uint32_t i = 0; i < sp_control.slots_used; i++)
        if (!over(&sp_slots[i], transition, mode))
            return false;
    return true;
}

/* Releases the request if every thread is where it has to be. */
static bool try_release(uint32_t transition, uint32_t mode, uint64_t deadline_ns)
{
    bool released = false;
    sp_lock_take();
    if (sp_control.answer.outcome == SP_GATHERING && now_ns() < deadline_ns && all_over(transition, mode)) {
        if (mode != SP_OTHERS)
            atomic_store(&committed, transition);
        sp_control.answer.outcome = SP_RELEASED;
        released = true;
    }
    sp_lock_leave();
    return released;
}

/* Returns true if every registered thread has handled the request or waits where it will take it. */
static bool everybody_knows(uint32_t transition, bool released, uint32_t mode)
{
    bool all = true;
    sp_lock_take();
    for (uint32_t i = 0; i < sp_control.slots_used; i++) {
        const struct sp_slot *slot = &sp_slots[i];
        enum sp_thread_state state = sp_state_get(slot);
        if (state == SP_BLOCKED || (state == SP_ACTIVE && released && !has_taken(slot, transition)))
            all = false;
        bool stands = mode == SP_GLOBAL || (mode == SP_GROUP && strcmp(slot->group, "a") == 0);
        if (!released && stands && has_taken(slot, transition) && state != SP_FREE)
            fail("an abandoned request was taken");
    }
    sp_lock_leave();
    return all;
}

/* Reports the state of each thread after a dead-lock, and fails. */
static void fail_stuck(uint32_t transition, uint32_t mode, const char *what)
{
    static const char *const states[] = {"free", "active", "parked", "inactive", "blocked"};
    sp_lock_take();
    fprintf(stderr, "model: transition %u, mode %u\n", transition, mode);
    for (uint32_t i = 0; i < sp_control.slots_used; i++)
        fprintf(stderr, "model: thread %d: %s, priority %u, group \"%s\", transition %u, generation %u\n",
                sp_slots[i].tid, states[sp_state_get(&sp_slots[i])], sp_slots[i].priority, sp_slots[i].group,
                sp_slots[i].transition, sp_slots[i].generation);
    sp_lock_leave();
    for (unsigned i = 0; i < THREADS; i++)
        fprintf(stderr, "model: thread %d %s\n", atomic_load(&tids[i]), WAITS_FOR[atomic_load(&doing[i])]);
    fail(what);
}

/* Gathers until released, abandoned, or until the patcher aborts; if the patcher dies, the deadline decides. */
static enum sp_outcome gather(uint32_t number, uint32_t transition, uint32_t mode, uint64_t limit_ns, bool dies)
{
    uint64_t deadline_ns = post(number, transition, mode, limit_ns);
    uint64_t patience = now_ns() + LONG_NS;
    for (;;) {
        if (!dies && try_release(transition, mode, deadline_ns))
            break;
        if (answer().outcome != SP_GATHERING)
            break;
        if ((mode == SP_LOCAL || mode == SP_OTHERS) && (dies || now_ns() >= deadline_ns)) {
            sp_lock_take();
            sp_control.answer.outcome = SP_ABANDONED;
            sp_lock_leave();
            break;
        }
        /* if all are parked, no thread waits for the deadline: the first thread that returns applies it */
        if (dies && now_ns() >= deadline_ns)
            tell_everybody(&settled);
        if (now_ns() > patience)
            fail_stuck(transition, mode, "a request is never settled");
        sleep_us(100);
    }
    ring();
    return (enum sp_outcome)answer().outcome;
}

/* Makes one change from beginning to end; returns true if it was released. With `hurries` it does not wait until every thread
 * has handled it: the next request arrives while threads are still blocked at this one. */
static bool request(uint32_t *number, uint32_t transition, uint32_t mode, uint64_t limit_ns, bool dies, bool hurries)
{
    enum sp_outcome outcome = SP_RELEASED;
    if (mode == SP_GROUP)
        outcome = gather(++*number, transition, SP_OTHERS, limit_ns, false);
    if (outcome == SP_RELEASED)
        outcome = gather(++*number, transition, mode, limit_ns, dies);
    uint64_t patience = now_ns() + LONG_NS;
    while (!hurries && !everybody_knows(transition, outcome == SP_RELEASED, mode)) {
        if (now_ns() > patience)
            fail_stuck(transition, mode, "a thread never gets to know");
        sleep_us(100);
    }
    tell_everybody(&settled);
    if (outcome != SP_RELEASED && limit_ns == NO_LIMIT_NS)
        fail("a request is abandoned though it has all the time");
    return outcome == SP_RELEASED;
}

static void start(pthread_t *thread, struct role *role)
{
    if (pthread_create(thread, NULL, role->number == 0 ? listen : live, role))
        fail("create");
}

static void join(pthread_t thread)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LONG_NS / 1000000000u;
    if (pthread_timedjoin_np(thread, NULL, &until))
        fail("a thread never ends");
}

int main(int argc, char **argv)
{
    unsigned seed = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 0) : (unsigned)now_ns();
    unsigned requests = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 0) : 200;
    struct sp_config config = {
        .size = sizeof config,
        .priorities = PRIORITIES,
        .wake = wake,
        .thread_migrated = on_migrated,
        .patch_applied = on_applied,
        .patch_done = on_done,
    };
    pthread_t threads[THREADS];
    struct role roles[THREADS];
    unsigned released = 0, abandoned = 0;
    printf("model: seed %u, %u requests\n", seed, requests);
    fflush(stdout);
    running = calloc(requests, sizeof *running);
    if (running == NULL)
        fail("no memory");
    if (sp_init(&config))
        fail("init");
    for (unsigned i = 0; i < THREADS; i++) {
        roles[i] = (struct role){i, next(&seed), i == 0 ? LISTENER : i % PRIORITIES, next(&seed) % 2};
        start(&threads[i], &roles[i]);
    }
    /* otherwise, on a busy machine, all requests end before the first of them has begun */
    while (slots_used() < THREADS)
        sleep_us(100);
    uint32_t number = 0;
    for (uint32_t transition = FIRST; transition < FIRST + requests; transition++) {
        static const uint32_t modes[] = {SP_LOCAL, SP_GROUP, SP_GLOBAL};
        uint64_t limit_ns = next(&seed) % 4 == 0 ? next(&seed) % 300000 : NO_LIMIT_NS;
        bool dies = next(&seed) % 8 == 0;
        if (dies)
            limit_ns = 2000000;
        bool hurries = next(&seed) % 2;
        if (request(&number, transition, modes[next(&seed) % 3], limit_ns, dies, hurries))
            released++;
        else
            abandoned++;
        for (unsigned i = 0; i < THREADS; i++)
            if (pthread_tryjoin_np(threads[i], NULL) == 0)
                start(&threads[i], &roles[i]);
        if (!hurries && next(&seed) % 2)
            sleep_us(next(&seed) % 3000); /* time to fall asleep */
    }
    atomic_store(&stop, true);
    tell_everybody(NULL);
    for (unsigned i = 0; i < THREADS; i++)
        join(threads[i]);
    printf("model: %u released, %u abandoned, %lu steps, %lu migrations, %lu births\n", released, abandoned,
           atomic_load(&steps), atomic_load(&migrations), atomic_load(&births));
    for (unsigned what = SLEEPS; what <= WAITS; what++) {
        printf("model: %lu times a thread %s\n", atomic_load(&times[what]), WAITS_FOR[what]);
        if (atomic_load(&times[what]) == 0)
            fail("no thread waited");
    }
    if (released == 0 || atomic_load(&migrations) == 0 || atomic_load(&refusals) == 0 || atomic_load(&done) < atomic_load(&applied))
        fail("nothing was tried");
    return 0;
}
