//#Rule: a hook of the patch runs after the commit, and one before the revert
//#Expect: accept
//#Changed: level
//#Hook: post_apply raise_level
//#Hook: pre_revert lower_level
//#Output-before: 1
//#Output-after: 110
//#Output-reverted: 1
#include "case.h"

static int current = 1;

KEEP int level(void) { return current SIDE(, + 9); }
KEEP void set_level(int to) { current = to; }

#ifdef SP_AFTER
int raise_level(void) { current += 100; return 0; }
int lower_level(void) { current -= 100; return 0; }
#endif

void answer(void)
{
	printf("%d", level());
	if (current < 0)
		set_level(1);
}
