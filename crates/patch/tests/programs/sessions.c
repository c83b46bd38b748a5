/* Threads that make, use and end objects all the time, of a structure that gains a member in version 2. The member counts
 * as `work` does: from 0 in an object that version 2 made, and from any moment in an older one. Memory is used again at once,
 * so that a value of an earlier object at the same address would be seen.
 *
 *   sessions CONTROL
 */
#include "control.h"

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#define VERSION 1

struct session {
    long id;
    int made_by;
#if VERSION >= 2
    int hits;
#endif
    int work;
    struct session *next;
};

/* Sessions inside of another object, which is made and ended as a whole. */
struct batch {
    int used;
    struct session sessions[4];
};

static struct session of_signals = {.made_by = 1};

PATCHED struct session *session_new(long id) {
    struct session *session = calloc(1, sizeof *session);
    if (!session) abort();
    session->id = id;
    session->made_by = VERSION;
    return session;
}

PATCHED struct batch *batch_new(void) {
    struct batch *batch = malloc(sizeof(struct batch));
    if (!batch) abort();
    memset(batch, 0, sizeof *batch);
    for (int i = 0; i < 4; i++) batch->sessions[i].made_by = VERSION;
    return batch;
}

PATCHED int session_work(struct session *session) {
    __atomic_add_fetch(&session->work, 1, __ATOMIC_SEQ_CST);
#if VERSION >= 2
    __atomic_add_fetch(&session->hits, 1, __ATOMIC_SEQ_CST);
#endif
    return VERSION;
}

/* Answers with its version, or 0 if the member has a wrong value. */
PATCHED int session_check(struct session *session) {
#if VERSION >= 2
    if (session->hits > session->work || session->hits < 0) return 0;
    if (session->made_by == 2 && session->hits != session->work) return 0;
#endif
    return session->id >= 0 ? VERSION : 0;
}

static void on_timer(int signal) {
    (void)signal;
    int saved = errno;
    session_work(&of_signals);
    errno = saved;
}

static void *user(void *arg) {
    struct observer o = observer_new(arg);
    struct session *lasting = session_new(1);
    unsigned random = (unsigned)(uintptr_t)&o;
    while (!stopping()) {
        struct session *session = session_new(2);
        struct batch *batch = batch_new();
        random = random * 1103515245u + 12345u;
        for (unsigned i = random >> 16 & 15; i > 0; i--) {
            uint64_t p = phase_now();
            observe(&o, p, session_work(session), "session_work");
            session_work(&batch->sessions[i % 4]);
        }
        session_work(lasting);
        uint64_t p = phase_now();
        observe(&o, p, session_check(session), "session_check");
        p = phase_now();
        observe(&o, p, session_check(&batch->sessions[random >> 20 & 3]), "session_check of a batch");
        p = phase_now();
        observe(&o, p, session_check(lasting), "session_check of an old session");
        free(batch);
        free(session);
        if ((random & 31) == 0) usleep(100);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, &timer, NULL);
    pthread_t thread;
    for (int i = 0; i < 4; i++) pthread_create(&thread, NULL, user, "user");
    await_slots(4);
    while (!stopping()) usleep(1000);
    return atomic_load(&control->violations) != 0;
}
