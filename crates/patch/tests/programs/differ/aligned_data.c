//#Rule: new data with an alignment of its own
//#Expect: accept
//#Changed: check
//#Output-before: 0
//#Output-after: 64
#include "case.h"

#ifdef SP_AFTER
static _Alignas(64) char line[128];
KEEP int check(void) { return (uintptr_t)line % 64 == 0 ? 64 : (int)line[3] - 1; }
#else
KEEP int check(void) { return 0; }
#endif

void answer(void) { printf("%d", check()); }
