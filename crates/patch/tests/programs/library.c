/* A shared library that a running program uses; see caller.c. */
#define VERSION 1

static long calls;

static long helper(long x) { return x * 3; }

long library_answer(long x);
long library_calls(void);

/* What the program calls, through its PLT or a pointer. */
__attribute__((noinline)) long library_answer(long x) {
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    return helper(x) * 16 + VERSION;
}

long library_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }
