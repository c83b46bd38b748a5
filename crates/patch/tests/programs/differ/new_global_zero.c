//#Rule: a new zero-initialised global
//#Expect: accept
//#Changed: next
//#Output-before: 5 | 5
//#Output-after: 6 | 7
//#Output-reverted: 5
#include "case.h"

#ifdef SP_AFTER
int calls;
#endif
KEEP int next(void) { return 5 + SIDE(0, ++calls); }

void answer(void) { printf("%d", next()); }
