//#Rule: a function in a section of its own name
//#Expect: accept
//#Changed: value
//#Output-before: 1
//#Output-after: 2
#include "case.h"

__attribute__((section("special_text"))) KEEP int value(void) { return SIDE(1, 2); }

void answer(void) { printf("%d", value()); }
