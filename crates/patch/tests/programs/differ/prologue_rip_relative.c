//#Rule: a prologue with a rip-relative operand
//#Expect: accept
//#Changed: next
//#Output-before: 8 | 9
//#Output-after: 19 | 29
//#Output-reverted: 30
#include "case.h"

static int total = 7;

KEEP int next(void) { return total += SIDE(1, 10); }

void answer(void) { printf("%d", next()); }
