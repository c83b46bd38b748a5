/* Threads of every kind with quiescence points, and one without.
 *
 *   points CONTROL MODE WORKERS
 *
 * MODE says what a thread may rely on between two of its points, and is checked: `alone` (its own calls are of one
 * version), `group` (so are those of all threads of group a at that time), `members` (the same, and nothing of others),
 * `all` (of all threads with points), `none` (nothing: it is probed).
 */
#include "control.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include <stillpoint.h>

#define VERSION 1

PATCHED long leaf(long x) { return x * 48 + VERSION; }

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static const char *mode;
static int together_all, together_group, alone;
/* Threads between two points, by the version that they have seen. */
static _Atomic int inside[16];

static void spin(int turns) {
    for (volatile int i = 0; i < turns; i++) {}
}

static int member(const char *group) { return together_all || (together_group && !strcmp(group, "a")); }

/* From one point to the next. */
static void between_points(struct observer *o, long n, const char *group) {
    uint64_t p = phase_now();
    long first = leaf(n);
    int version = first & 15;
    int counted = member(group);
    if (counted) {
        atomic_fetch_add(&inside[version], 1);
        for (int other = 0; other < 16; other++)
            if (other != version && atomic_load(&inside[other]))
                violation("versions %d and %d run at the same time", version, other);
    }
    answer(o, p, first, n * 3, "leaf");
    spin(2000);
    p = phase_now();
    long second = leaf(n + 1);
    answer(o, p, second, (n + 1) * 3, "leaf");
    if ((alone || counted) && (second & 15) != version)
        violation("version %ld after %d between two points", second & 15, version);
    if (counted) atomic_fetch_sub(&inside[version], 1);
}

static void *worker(void *arg) {
    const char *group = arg;
    struct observer o = observer_new("worker");
    sp_thread_birth_group("worker", group);
    for (long n = 0; !stopping(); n++) {
        between_points(&o, n & 0xffffff, group);
        sp_quiescence_point();
        if (n % 8 == 0) {
            sp_park_begin();
            usleep(500);
            sp_park_end();
        }
    }
    sp_thread_death();
    return NULL;
}

/* Sleeps without saying so: only the wake-up brings it to its point. */
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t alarm_clock = PTHREAD_COND_INITIALIZER;
static unsigned rung;

static void *sleeper(void *arg) {
    (void)arg;
    struct observer o = observer_new("sleeper");
    sp_thread_birth("sleeper");
    sp_set_priority(1);
    while (!stopping()) {
        between_points(&o, 1, "");
        pthread_mutex_lock(&bed);
        for (unsigned before = rung; rung == before;) pthread_cond_wait(&alarm_clock, &bed);
        pthread_mutex_unlock(&bed);
        sp_quiescence_point();
    }
    return NULL;
}

static int doorbell;

static void *listener(void *arg) {
    (void)arg;
    struct observer o = observer_new("sleeper");
    sp_thread_birth("listener");
    sp_set_priority(2);
    while (!stopping()) {
        between_points(&o, 1, "");
        sp_quiescence_point();
        struct pollfd event = {.fd = doorbell, .events = POLLIN};
        uint64_t rings;
        if (poll(&event, 1, -1) == 1 && read(doorbell, &rings, sizeof rings) != sizeof rings) violation("read: %m");
    }
    return NULL;
}

static int wake(unsigned level, void *data) {
    (void)data;
    if (level == 1) {
        pthread_mutex_lock(&bed);
        rung++;
        pthread_cond_broadcast(&alarm_clock);
        pthread_mutex_unlock(&bed);
    }
    uint64_t one = 1;
    if (level == 2 && write(doorbell, &one, sizeof one) != sizeof one) violation("write: %m");
    return 1;
}

static void *parked(void *arg) {
    (void)arg;
    int fds[2];
    char byte;
    if (pipe2(fds, O_CLOEXEC)) violation("pipe: %m");
    struct observer o = observer_new("blocked");
    sp_thread_birth("parked");
    between_points(&o, 1, "");
    sp_park_begin();
    ssize_t got = read(fds[0], &byte, 1);
    violation("a read without an answer returned %zd (%m)", got);
    return NULL;
}

/* The library does not know it. */
static void *stranger(void *arg) {
    (void)arg;
    struct observer o = observer_new("stranger");
    for (long n = 0; !stopping(); n++) {
        uint64_t p = phase_now();
        answer(&o, p, leaf(n), n * 3, "leaf");
        usleep(1000);
    }
    return NULL;
}

static void *mayfly(void *arg) {
    (void)arg;
    sp_thread_birth("mayfly");
    struct observer o = {.slot = &control->slots[SLOTS - 1]};
    for (long n = 0; n < 3; n++) {
        between_points(&o, n, "");
        sp_quiescence_point();
    }
    sp_thread_death();
    return NULL;
}

static unsigned long thread_count(void *data) {
    (void)data;
    return atomic_load(&control->slots_used);
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    control_open(argv[1]);
    mode = argv[2];
    together_all = !strcmp(mode, "all"), together_group = !strcmp(mode, "group") || !strcmp(mode, "members");
    alone = strcmp(mode, "none") && strcmp(mode, "members");
    int workers = atoi(argv[3]);
    doorbell = eventfd(0, EFD_CLOEXEC);
    struct sp_config config = {.size = sizeof config, .priorities = 3, .wake = wake, .thread_count = thread_count};
    if (sp_init(&config)) return 3;
    if (sp_init(&config) != -EALREADY) return 3;
    pthread_t thread;
    for (int i = 0; i < workers; i++) pthread_create(&thread, NULL, worker, i % 2 ? "b" : "a");
    pthread_create(&thread, NULL, sleeper, NULL);
    pthread_create(&thread, NULL, listener, NULL);
    pthread_create(&thread, NULL, parked, NULL);
    pthread_create(&thread, NULL, stranger, NULL);
    await_slots((uint32_t)workers + 4);
    /* the main thread is another that the library does not know */
    while (!stopping()) {
        if (pthread_create(&thread, NULL, mayfly, NULL) == 0) pthread_join(thread, NULL);
        usleep(2000);
    }
    return atomic_load(&control->violations) != 0;
}
