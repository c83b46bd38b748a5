// A program without a C library, for -m32 -static -nostdlib and -static -nostdlib: says that it is ready and sleeps.
#ifdef __i386__
#define CALL "int $0x80"
enum { WRITE = 4, PAUSE = 29 };
#define A "b"
#define B "c"
#define C "d"
#else
#define CALL "syscall"
enum { WRITE = 1, PAUSE = 34 };
#define A "D"
#define B "S"
#define C "d"
#endif

static long call(long nr, long a, const void *b, long c)
{
    long result;
    asm volatile(CALL : "=a"(result) : "0"(nr), A(a), B(b), C(c) : "memory", "cc"
#ifdef __x86_64__
                 , "rcx", "r11"
#endif
    );
    return result;
}

void _start(void)
{
    call(WRITE, 1, "ready foreign 1\n", 16);
    for (;;)
        call(PAUSE, 0, 0, 0);
}
