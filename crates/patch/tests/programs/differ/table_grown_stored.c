//#Rule: a static table that grows is refused where code stores its address, also with the author's permission
//#Expect: refuse variable-changed
//#Refusal: `limits`
//#Refusal: `keep` stores its address
//#Data: limits
//#Opt: -O2 -O3
//#Output-before: 20
#include "case.h"

static int limits[] = { 10, 20, 30, 0,
#ifdef SP_AFTER
	0,
#endif
};
static int *volatile kept;

KEEP void keep(void) { kept = limits; }
KEEP int get(int i) { return kept[i] + limits[3]; }

void answer(void)
{
	keep();
	printf("%d", get(1));
}
