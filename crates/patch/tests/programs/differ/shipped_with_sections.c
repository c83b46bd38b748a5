//#Rule: a target that was built with -ffunction-sections itself
//#Expect: accept
//#Flags: -ffunction-sections -fdata-sections -fno-semantic-interposition
//#Changed: step
//#Output-before: 1 | 2
//#Output-after: 5 | 8
//#Output-reverted: 9
#include "case.h"

static int counter;

KEEP int step(void) { return counter += SIDE(1, 3); }

void answer(void) { printf("%d", step()); }
