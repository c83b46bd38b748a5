//#Rule: a function shorter than a jump with padding behind it
//#Expect: accept
//#Opt: -O2
//#Flags: -falign-functions=16 -fcf-protection=none -fpatchable-function-entry=0
//#Changed: tiny
//#Output-before: 0
//#Output-after: 1
#include "case.h"

KEEP int tiny(void) { return SIDE(0, 1); }

int (*volatile pointer)(void) = tiny;

void answer(void) { printf("%d", pointer()); }
