//#Rule: a file static is shared with code that does not change
//#Expect: accept
//#Changed: raise_level
//#Unchanged: level
//#Output-before: 1 | 2
//#Output-after: 12 | 22
//#Output-reverted: 23
#include "case.h"

static int current;

KEEP void raise_level(void) { current += SIDE(1, 10); }
KEEP int level(void) { return current; }

void answer(void)
{
	raise_level();
	printf("%d", level());
}
