//#Rule: a static local keeps its address and its value
//#Expect: accept
//#Changed: count
//#Output-before: 1 | 2 | 3
//#Output-after: 103 | 203
//#Output-reverted: 204 | 205
#include "case.h"

KEEP int count(void)
{
	static int n;

	return n += SIDE(1, 100);
}

void answer(void) { printf("%d", count()); }
