//#Rule: without #line the noise is seen as what it is, a change
//#Expect: accept
//#Changed: traced
//#Output-before: 12
//#Output-after: 14
#include "case.h"

#ifdef SP_AFTER
/* a line */
/* and a line */
#endif
#line SIDE(12, 14)
KEEP int traced(void) { return __LINE__; }

void answer(void) { printf("%d", traced()); }
