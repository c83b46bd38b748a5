//#Rule: the second patch calls, from another unit, a function that the first one added
//#Expect: accept
//#Changed: outer
//#Output-before: 5 6
//#Output-base: 50 6
//#Output-after: 50 60
#include "case.h"

int outer(int a);
#ifdef SP_BASE
KEEP int tenfold(int a) { return a * 10; }
#endif
KEEP int inner(int a)
{
	ROOM;
#ifdef SP_BASE
	return tenfold(a);
#else
	return a;
#endif
}

void answer(void)
{
	int a = inner(5);

	printf("%d %d", a, outer(6));
}
//#Unit: other.c
#include "case.h"

int tenfold(int a);

KEEP int outer(int a)
{
	ROOM;
	return SIDE(a, tenfold(a));
}
