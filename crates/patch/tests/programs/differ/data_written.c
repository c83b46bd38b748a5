//#Rule: new initial values are written with the author's permission, also pointers to new text and to new code
//#Expect: accept
//#Data: limit names steps
//#Unchanged: get name step
//#Warning: copies that the program has made
//#Output-before: 10 b 1
//#Output-after: 20 c 3
#include "case.h"

static volatile int limit = SIDE(10, 20);
static const char *volatile names[] = { "a", SIDE("b", "c") };
KEEP int one(void) { return 1; }
#ifdef SP_AFTER
KEEP int three(void) { return 3; }
#endif
static int (*volatile steps[])(void) = { SIDE(one, three), one };

KEEP int get(void) { return limit; }
KEEP const char *name(int i) { return names[i]; }
KEEP int step(int i) { return steps[i]() + 0 * i; }

void answer(void) { printf("%d %s %d", get(), name(1), step(0)); }
