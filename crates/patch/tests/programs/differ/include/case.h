/* What directive programs share. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One of two texts, on one line on both sides: line numbers stay. */
#ifdef SP_AFTER
#define SIDE(before, after) after
#else
#define SIDE(before, after) before
#endif

/* A function that is called as written: not inlined, cloned or analysed by its callers. */
#ifdef __clang__
#define KEEP __attribute__((noinline))
#else
#define KEEP __attribute__((noipa))
#endif

#ifdef __cplusplus
extern "C" void answer(void);
#endif

/* Seven bytes of nothing: a function shorter than a jump is a case of its own. */
#define ROOM __asm__ volatile("nopl 0x12345678(%rax)")
