//#Rule: a static local gets another type
//#Expect: refuse variable-changed
//#Refusal: next
//#Output-before: 1
#include "case.h"

KEEP long next()
{
#ifdef SP_AFTER
	static long n;
#else
	static int n;
#endif
	return n += SIDE(1, 2);
}

void answer() { printf("%ld", next()); }
