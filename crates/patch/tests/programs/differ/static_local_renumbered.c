//#Rule: a new static local shifts the numbers of the others, which keep their values all the same
//#Expect: accept
//#Changed: left
//#Unchanged: right
//#Output-before: 1 1001 | 2 1002
//#Output-after: 8 1003 | 10 1004
//#Output-reverted: 5 1005
#include "case.h"

#ifdef SP_AFTER
KEEP int left(void)
{
	static int n;
	static int calls = 5;
	int before = n++;

	return before + ++calls;
}
#line 33
#else
KEEP int left(void)
{
	static int n;

	return ++n;
}
#line 33
#endif
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
