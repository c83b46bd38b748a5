//#Rule: two patches of a series change one function
//#Expect: accept
//#Changed: value
//#Output-before: 1
//#Output-base: 12
//#Output-after: 123
#include "case.h"

#ifdef SP_BASE
#define VALUE SIDE(12, 123)
#else
#define VALUE 1
#endif

KEEP int value(void) { return VALUE; }

void answer(void) { printf("%d", value()); }
