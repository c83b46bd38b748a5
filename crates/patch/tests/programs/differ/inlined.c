//#Rule: inlining widens a change to every function that holds a copy
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: left right
//#Output-before: 2 3
//#Output-after: 11 12
#include "case.h"

static inline __attribute__((always_inline)) int bump(int a) { return a + SIDE(1, 10); }

KEEP int left(void) { return bump(1); }
KEEP int right(void) { return bump(2); }

void answer(void) { printf("%d %d", left(), right()); }
