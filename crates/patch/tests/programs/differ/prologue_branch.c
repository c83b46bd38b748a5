//#Rule: a prologue with a branch among its first five bytes
//#Expect: accept
//#Changed: guard
//#Output-before: 0 5
//#Output-after: 1 6
#include "case.h"

KEEP int guard(const int *p)
{
	if (!p)
		return SIDE(0, 1);
	return *p + SIDE(0, 1);
}

void answer(void)
{
	int five = 5;

	printf("%d %d", guard(NULL), guard(&five));
}
