/* Gets libstillpoint by dlopen, when it is told to: until then nobody knows of any points.
 *
 *   late_library CONTROL PATH-OF-LIBRARY
 *
 * On command it loads the library and its threads register; a child that is forked then lives by itself.
 */
#include "control.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>

#include <stillpoint.h>

#define VERSION 1
#define WORKERS 3

PATCHED long leaf(long x) { return x * 48 + VERSION; }

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static struct {
    int (*init)(const struct sp_config *);
    int (*birth)(const char *);
    int (*park_begin)(void), (*park_end)(void);
    void (*slow)(void);
} library;
static _Atomic int loaded;
static _Atomic uint32_t registered;

static void load(const char *path) {
    void *handle = dlopen(path, RTLD_NOW);
    if (!handle) violation("%s", dlerror());
    *(void **)&library.init = dlsym(handle, "sp_init");
    *(void **)&library.birth = dlsym(handle, "sp_thread_birth");
    *(void **)&library.park_begin = dlsym(handle, "sp_park_begin");
    *(void **)&library.park_end = dlsym(handle, "sp_park_end");
    *(void **)&library.slow = dlsym(handle, "sp_quiescence_slow");
    struct sp_config config = {.size = sizeof config};
    int error = library.init(&config);
    if (error) violation("sp_init: %d", error);
    /* the program may close it again: it stays */
    dlclose(handle);
    atomic_store(&loaded, 1);
}

static void *worker(void *arg) {
    struct observer o = observer_new(arg);
    int born = 0;
    for (long n = 0; !stopping(); n++) {
        uint64_t p = phase_now();
        answer(&o, p, leaf(n & 0xffffff), (n & 0xffffff) * 3, "leaf");
        if (atomic_load(&loaded) && !born) {
            if (library.birth("worker")) violation("birth");
            born = 1;
            atomic_fetch_add(&registered, 1);
        }
        if (born) {
            library.slow();
            library.park_begin();
        }
        usleep(500);
        if (born) library.park_end();
    }
    return NULL;
}

/* A child forked while its parent may be in the middle of anything: it goes on, whatever its parent is asked. */
static void fork_child(void) {
    pid_t child = fork();
    if (child == 0) {
        if (library.birth("child")) _exit(1);
        for (int i = 0; i < 20; i++) {
            library.slow();
            usleep(1000);
        }
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status) violation("a child ended with %d", status);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    control_open(argv[1]);
    pthread_t thread;
    for (int i = 0; i < WORKERS; i++) pthread_create(&thread, NULL, worker, "worker");
    await_slots(WORKERS);
    while (!stopping()) {
        if (atomic_load(&control->command) && !atomic_load(&loaded)) load(argv[2]);
        if (atomic_load(&registered) == WORKERS) fork_child();
        usleep(2000);
    }
    return atomic_load(&control->violations) != 0;
}
