//#Rule: a new static local
//#Expect: accept
//#Changed: next
//#Output-before: 5 | 5
//#Output-after: 105 | 106
//#Output-reverted: 5
#include "case.h"

KEEP int next(void)
{
#ifdef SP_AFTER
	static int calls = 100;

	return 5 + calls++;
#else
	return 5;
#endif
}

void answer(void) { printf("%d", next()); }
