//#Rule: an initialised static local keeps its value of now, not the one of the source
//#Expect: accept
//#Changed: count
//#Output-before: 41 | 42
//#Output-after: 52 | 62
//#Output-reverted: 63
#include "case.h"

KEEP int count(void)
{
	static int n = 40;

	return n += SIDE(1, 10);
}

void answer(void) { printf("%d", count()); }
