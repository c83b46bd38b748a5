/* Uses the library sharing.cc and, by itself, the inline code that both have.
 *
 *   sharer CONTROL
 */
#include "control.h"

#include <pthread.h>

#define VERSION 1

/* The same text in both, as a header would bring it. */
PATCHED inline long shared_rule(long x) { return x * 48 + VERSION; }

extern "C" long library_rule(long x);

static void ask(const char *role, long (*rule)(long)) {
    struct observer o = observer_new(role);
    for (long n = 0; !stopping(); n++) {
        uint64_t p = phase_now();
        answer(&o, p, rule(n), n * 3, role);
        if (n % 100 == 0) usleep(200);
    }
}

static void *own(void *) {
    ask("own", [](long x) { return shared_rule(x); });
    return NULL;
}

static void *library(void *) {
    ask("library", [](long x) { return library_rule(x); });
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    pthread_t thread;
    pthread_create(&thread, NULL, own, NULL);
    pthread_create(&thread, NULL, library, NULL);
    await_slots(2);
    while (!stopping()) usleep(1000);
    return atomic_load(&control->violations) != 0;
}
