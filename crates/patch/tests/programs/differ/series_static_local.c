//#Rule: a static local that the first patch added keeps its value through the second
//#Expect: accept
//#Changed: next
//#Output-before: 0 | 0
//#Output-base: 1 | 2
//#Output-after: 12 | 22
//#Output-reverted: 23
#include "case.h"

KEEP int next(void)
{
#ifdef SP_BASE
	static int n;

	return n += SIDE(1, 10);
#else
	return 0;
#endif
}

void answer(void) { printf("%d", next()); }
