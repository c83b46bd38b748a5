/* Threads read tables that a test changes: no thread may ever see values of two versions, or those of another version
 * than its code.
 *
 *   tables CONTROL [reading threads]
 *
 * The command makes the program write to one of the tables.
 */
#include "control.h"

#include <pthread.h>

/* With libstillpoint, each thread that reads has a quiescence point. */
#ifdef POINTS
#include <stillpoint.h>
#else
#define sp_thread_birth(name) 0
#define sp_quiescence_point() (void)0
#endif

#define VERSION 1

/* Several pages, in data that the program may write and in constants. */
#define ROWS 1300

static volatile long limits[ROWS] = {[0 ... ROWS - 1] = VERSION};
const long ceilings[ROWS] = {[0 ... ROWS - 1] = VERSION * 3};
const char *const labels[] = {"first " STRING(VERSION), "second", "third " STRING(VERSION)};
static volatile int touched[] = {VERSION, 2, 3};

PATCHED long first_handler(void) { return 1; }
#if VERSION == 2
PATCHED long handler_of_2(void) { return 2; }
#define HANDLER handler_of_2
#elif VERSION == 3
PATCHED long handler_of_3(void) { return 3; }
#define HANDLER handler_of_3
#else
#define HANDLER first_handler
#endif
static long (*volatile handlers[])(void) = {HANDLER, first_handler};

/* Answers with its version, or 0 if a value is of another one. */
PATCHED long read_tables(void) {
    const long *ceiling = ceilings;
    const char *const *label = labels;
    long wrong = 0;
    __asm__ volatile("" : "+r"(ceiling), "+r"(label));
    for (int i = 0; i < ROWS; i++) wrong += (limits[i] != VERSION) + (ceiling[i] != VERSION * 3);
    wrong += strcmp(label[0], "first " STRING(VERSION)) != 0;
    wrong += strcmp(label[1], "second") != 0;
    wrong += strcmp(label[2], "third " STRING(VERSION)) != 0;
    wrong += handlers[0]() != VERSION;
    wrong += handlers[1]() != 1;
    return wrong ? 0 : VERSION;
}

/* Code that does not change, and reads the tables. */
PATCHED long first_limit(void) { return limits[0]; }

PATCHED void touch(void) { touched[1] += touched[0]; }

static void *reader(void *arg) {
    struct observer o = observer_new(arg);
    if (sp_thread_birth("reader")) violation("sp_thread_birth");
    while (!stopping()) {
        sp_quiescence_point();
        uint64_t p = phase_now();
        observe(&o, p, (int)read_tables(), "read_tables");
        p = phase_now();
        observe(&o, p, (int)first_limit(), "first_limit");
        usleep(200);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
#ifdef POINTS
    struct sp_config config = {.size = sizeof config};
    if (sp_init(&config)) return 3;
#endif
    int readers = argc > 2 ? atoi(argv[2]) : 3;
    pthread_t thread;
    for (int i = 0; i < readers; i++) pthread_create(&thread, NULL, reader, "reader");
    await_slots((uint32_t)readers);
    while (!stopping()) {
        if (atomic_exchange(&control->command, 0)) touch();
        usleep(1000);
    }
    return atomic_load(&control->violations) != 0;
}
