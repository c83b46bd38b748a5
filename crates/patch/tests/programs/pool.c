/* A thread pool: a listener hands work to workers, a timer watches.
 *
 *   pool CONTROL careless|careful
 *
 * `careless`: a quiescence point at the top of each loop, and nothing else. At a global request the listener stops at
 * its point, so that workers which wait for work never come to theirs: IDLE of them at least, at any moment. `careful`:
 * workers that wait are parked, and the listener and the timer stop last.
 */
#include "control.h"

#include <pthread.h>

#include <stillpoint.h>

#define VERSION 1
#define WORKERS 4
#define IDLE 2
#define OUTSTANDING (WORKERS - IDLE)

enum { WORKING, LISTENING };

PATCHED long work(long x) { return x * 48 + VERSION; }

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static int careful;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t filled = PTHREAD_COND_INITIALIZER;
static long queue[OUTSTANDING];
static unsigned head, tail, done;

/* A wait for work, which ends the work before it. They take turns, so that none is left out for long. The lock is let go
 * of before the thread stands anywhere. */
static int await_work(unsigned me, long *job, unsigned finished) {
    if (careful) sp_park_begin();
    pthread_mutex_lock(&lock);
    done += finished;
    while ((head == tail || head % WORKERS != me) && !stopping()) pthread_cond_wait(&filled, &lock);
    int got = head != tail && head % WORKERS == me;
    if (got) *job = queue[head++ % OUTSTANDING];
    pthread_cond_broadcast(&filled);
    pthread_mutex_unlock(&lock);
    if (careful) sp_park_end();
    return got;
}

static void *worker(void *arg) {
    struct observer o = observer_new("worker");
    sp_thread_birth_group("worker", "pool");
    sp_set_priority(WORKING);
    for (unsigned finished = 0; !stopping(); finished = 1) {
        sp_quiescence_point();
        long job;
        if (!await_work((uintptr_t)arg, &job, finished)) break;
        uint64_t p = phase_now();
        answer(&o, p, work(job), job * 3, "work");
    }
    sp_thread_death();
    return NULL;
}

/* What it hands out is done before it hands out more: it needs the workers, and they need it. */
static void *listener(void *arg) {
    (void)arg;
    struct observer o = observer_new("listener");
    sp_thread_birth("listener");
    if (careful) sp_set_priority(LISTENING);
    for (long n = 0; !stopping(); n++) {
        sp_quiescence_point();
        pthread_mutex_lock(&lock);
        if (tail - done < OUTSTANDING) queue[tail++ % OUTSTANDING] = n & 0xffffff;
        pthread_cond_broadcast(&filled);
        pthread_mutex_unlock(&lock);
        uint64_t p = phase_now();
        answer(&o, p, work(n), n * 3, "work");
        usleep(200);
    }
    return NULL;
}

static void *timer(void *arg) {
    (void)arg;
    struct observer o = observer_new("timer");
    sp_thread_birth("timer");
    if (careful) sp_set_priority(LISTENING);
    while (!stopping()) {
        sp_quiescence_point();
        uint64_t p = phase_now();
        answer(&o, p, work(1), 3, "work");
        usleep(2000);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    control_open(argv[1]);
    careful = !strcmp(argv[2], "careful");
    struct sp_config config = {.size = sizeof config, .priorities = careful ? 2 : 1};
    if (sp_init(&config)) return 3;
    pthread_t thread;
    for (uintptr_t i = 0; i < WORKERS; i++) pthread_create(&thread, NULL, worker, (void *)i);
    pthread_create(&thread, NULL, listener, NULL);
    pthread_create(&thread, NULL, timer, NULL);
    await_slots(WORKERS + 2);
    while (!stopping()) usleep(10000);
    return atomic_load(&control->violations) != 0;
}
