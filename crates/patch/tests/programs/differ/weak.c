//#Rule: a weak function
//#Expect: accept
//#Changed: value
//#Output-before: 1
//#Output-after: 2
#include "case.h"

__attribute__((weak, noipa)) int value(void) { return SIDE(1, 2); }

void answer(void) { printf("%d", value()); }
