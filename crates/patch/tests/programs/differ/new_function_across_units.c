//#Rule: a new global function used from another unit
//#Expect: accept
//#Changed: total
//#Output-before: 3
//#Output-after: 30
#include "case.h"

#ifdef SP_AFTER
int tenfold(int a);
#endif
KEEP int total(int a)
{
	ROOM;
	return SIDE(a, tenfold(a));
}

void answer(void) { printf("%d", total(3)); }
//#Unit: other.c
#include "case.h"

KEEP int present(int a) { return a; }
#ifdef SP_AFTER
KEEP int tenfold(int a) { return present(a) * 10; }
#endif
