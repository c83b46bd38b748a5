//#Rule: a signature may change with all its callers
//#Expect: accept
//#Changed: scale twice
//#Output-before: 6
//#Output-after: 7
#include "case.h"

#ifdef SP_AFTER
static KEEP int scale(int a, int more) { return a * 2 + more; }
KEEP int twice(int a) { return scale(a, 1); }
#else
static KEEP int scale(int a) { return a * 2; }
KEEP int twice(int a) { return scale(a); }
#endif

void answer(void) { printf("%d", twice(3)); }
