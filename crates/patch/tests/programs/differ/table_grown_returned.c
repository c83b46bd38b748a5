//#Rule: a static table that grows is refused where code returns its address
//#Expect: refuse variable-changed
//#Refusal: `limits`
//#Refusal: `table` returns its address
//#Data: limits
//#Opt: -O2 -O3
//#Output-before: 20
#include "case.h"

static int limits[] = { 10, 20,
#ifdef SP_AFTER
	30,
#endif
};

KEEP int *table(void) { return limits; }

void answer(void) { printf("%d", table()[1]); }
