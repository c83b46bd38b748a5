//#Rule: a new constant table
//#Expect: accept
//#Changed: pick
//#Output-before: 1 2 3
//#Output-after: 11 22 33
#include "case.h"

#ifdef SP_AFTER
static const int table[] = { 0, 11, 22, 33 };
#endif
KEEP int pick(int i) { return SIDE(i, table[i]); }

void answer(void) { printf("%d %d %d", pick(1), pick(2), pick(3)); }
