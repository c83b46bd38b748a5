//#Rule: a function that is gone on the after side stays in the target
//#Expect: accept
//#Changed: total
//#Output-before: 30
//#Output-after: 33
#include "case.h"

#ifdef SP_AFTER
KEEP int total(int a) 
{
	ROOM;
	return a * 11;
}
#else
static KEEP int tenfold(int a) { return a * 10; }
KEEP int total(int a) 
{
	ROOM;
	return tenfold(a);
}
#endif

void answer(void) { printf("%d", total(3)); }
