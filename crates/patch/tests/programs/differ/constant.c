//#Rule: the smallest change, one immediate operand
//#Expect: accept
//#Changed: value
//#Output-before: one 1
//#Output-after: one 2
#include "case.h"

KEEP int value(void) { return SIDE(1, 2); }

void answer(void) { printf("one %d", value()); }
