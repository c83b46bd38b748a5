//#Rule: a function shorter than a jump that others may call by pointer is refused
//#Expect: refuse entry-too-short
//#Opt: -O2 -Os
//#Flags: -falign-functions=1 -fcf-protection=none -fpatchable-function-entry=0
//#Refusal: function `tiny`
//#Output-before: 0
#include "case.h"

KEEP int tiny(void) { return SIDE(0, 1); }
KEEP int tiny_next(void) { return 5; }

int (*volatile pointer)(void) = tiny;

void answer(void) { printf("%d", pointer()); }
