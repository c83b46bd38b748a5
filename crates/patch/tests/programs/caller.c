/* Uses the library library.c from several threads.
 *
 *   caller CONTROL
 */
#include "control.h"

#include <pthread.h>

long library_answer(long x);
long library_calls(void);

static void *hammer(void *arg) {
    struct observer o = observer_new(arg);
    for (long n = 0; !stopping(); n++) {
        long before = library_calls();
        for (int i = 0; i < 100; i++) {
            uint64_t p = phase_now();
            answer(&o, p, library_answer(n), n * 3, "library_answer");
        }
        if (library_calls() < before + 100) violation("the library lost its state");
        usleep(200);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    pthread_t thread;
    for (int i = 0; i < 4; i++) pthread_create(&thread, NULL, hammer, "hammer");
    await_slots(4);
    while (!stopping()) usleep(1000);
    return atomic_load(&control->violations) != 0;
}
