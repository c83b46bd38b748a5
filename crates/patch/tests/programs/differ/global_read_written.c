//#Rule: a global of the target is reached by its own address
//#Expect: accept
//#Changed: step
//#Output-before: 1 | 2
//#Output-after: 5 | 8
//#Output-reverted: 9
#include "case.h"

int counter;

KEEP int step(void) { return counter += SIDE(1, 3); }

void answer(void) { printf("%d", step()); }
