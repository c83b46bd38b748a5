//#Rule: a main-like function in .text.startup, and an exit-like in .text.exit
//#Expect: accept
//#Changed: value
//#Output-before: 1
//#Output-after: 2
//#Has: .text.startup
#include "case.h"

__attribute__((section(".text.startup"))) KEEP int value(void) { return SIDE(1, 2); }

void answer(void) { printf("%d", value()); }
