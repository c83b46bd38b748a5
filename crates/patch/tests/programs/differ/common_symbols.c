//#Rule: common symbols are the target's, not new ones
//#Expect: accept
//#Flags: -fcommon
//#Changed: step
//#Output-before: 1 | 2
//#Output-after: 5 | 8
//#Output-reverted: 9
//#Has: counter
#include "case.h"

int counter;

KEEP int step(void) { return counter += SIDE(1, 3); }

void answer(void) { printf("%d", step()); }
