//#Rule: an unchanged build yields nothing to patch
//#Expect: nothing
//#Output-before: 7
#include "case.h"

KEEP int value(void) { return 7; }

void answer(void) { printf("%d", value()); }
