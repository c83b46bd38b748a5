//#Rule: a static table that grows is refused where code gives its address to a function, or data holds it
//#Expect: refuse variable-changed
//#Refusal: `limits`
//#Refusal: `ask` may give its address to a function that it calls
//#Refusal: `names`
//#Refusal: `holder` holds its address
//#Data: limits names
//#Opt: -O2 -O3
//#Output-before: 20 10 5
#include "case.h"

static int limits[] = { 10, 20,
#ifdef SP_AFTER
	30,
#endif
};
static int names[] = { 5, 6,
#ifdef SP_AFTER
	7,
#endif
};
static int *volatile holder = names;

KEEP int sum(volatile int *all, int i) { return all[i]; }
KEEP int ask(int i) { return sum(limits, i) + limits[0] * 0; }
KEEP int first(void) { return limits[0] + names[0] * 0; }
KEEP int held(void) { return holder[0]; }

void answer(void) { printf("%d %d %d", ask(1), first(), held()); }
