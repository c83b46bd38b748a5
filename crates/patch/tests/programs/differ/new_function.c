//#Rule: a new static function
//#Expect: accept
//#Changed: total
//#Output-before: 3
//#Output-after: 30
#include "case.h"

#ifdef SP_AFTER
static KEEP int tenfold(int a) { return a * 10; }
#endif
KEEP int total(int a)
{
	ROOM;
	return SIDE(a, tenfold(a));
}

void answer(void) { printf("%d", total(3)); }
