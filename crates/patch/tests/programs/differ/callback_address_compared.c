//#Rule: the address of a patched function is the same in old and new code
//#Expect: accept
//#Changed: store callback
//#Output-before: same a
//#Output-after: same b
#include "case.h"

static void (*stored)(void);

static KEEP void callback(void) { printf(SIDE(" a", " b")); }
KEEP void store(void) { stored = SIDE(stored ? stored :, stored && stored == callback ? stored :) callback; }
KEEP int same(void) { return stored == callback SIDE(, && stored != 0); }

void answer(void)
{
	store();
	printf(same() ? "same" : "another");
	stored();
}
