//#Rule: objects with intermediate code are refused by name
//#Expect: refuse lto
//#Opt: -O2
//#Flags: -flto
//#Refusal: -flto
//#Output-before: 1
//#Has: .gnu.lto_
#include "case.h"

KEEP int value(void) { return SIDE(1, 2); }

void answer(void) { printf("%d", value()); }
