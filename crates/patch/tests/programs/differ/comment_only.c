//#Rule: comments, layout and names of locals are no change
//#Expect: nothing
//#Output-before: 7
#include "case.h"

#ifdef SP_AFTER
KEEP int value(int renamed) { /* the same */ return renamed + 1; }
#else
KEEP int value(int argument) { return argument + 1; }
#endif

void answer(void) { printf("%d", value(6)); }
