//#Rule: numbering kept by #line after each hunk: __LINE__ of untouched code is no change
//#Expect: accept
//#Changed: fixed
//#Unchanged: traced
//#Output-before: 1 20
//#Output-after: 2 20
#include "case.h"

KEEP int fixed(void)
{
#ifdef SP_AFTER
	/* some
	   more
	   lines */
#endif
	return SIDE(1, 2);
}
#line 19

KEEP int traced(void) { return __LINE__; }

void answer(void) { printf("%d %d", fixed(), traced()); }
