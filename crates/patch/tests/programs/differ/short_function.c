//#Rule: a function shorter than a jump: its callers are patched instead, or the room behind it is used
//#Expect: accept
//#Opt: -O2 -Os
//#Flags: -falign-functions=1 -fcf-protection=none -fpatchable-function-entry=0
//#Changed: caller
//#Output-before: 0
//#Output-after: 1
#include "case.h"

static KEEP int tiny(void) { return SIDE(0, 1); }
static KEEP void tiny_next(void) { }

KEEP int caller(void)
{
	tiny_next();
	return tiny();
}

void answer(void) { printf("%d", caller()); }
