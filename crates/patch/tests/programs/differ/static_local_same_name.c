//#Rule: static locals of one name are told apart by the functions that refer to them
//#Expect: accept
//#Changed: left
//#Unchanged: right
//#Output-before: 1 1001 | 2 1002
//#Output-after: 12 1003 | 22 1004
//#Output-reverted: 23 1005
#include "case.h"

KEEP int left(void)
{
	static int n;

	return n += SIDE(1, 10);
}

KEEP int right(void)
{
	static int n = 1000;

	return ++n;
}

void answer(void)
{
	int l = left();

	printf("%d %d", l, right());
}
