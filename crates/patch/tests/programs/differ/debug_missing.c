//#Rule: without debug information types cannot be compared: refused
//#Expect: refuse debug-info
//#Flags: -g0
//#Refusal: compile with -g
//#Output-before: 1
#include "case.h"

KEEP int value(void) { return SIDE(1, 2); }

void answer(void) { printf("%d", value()); }
