//#Rule: __func__ and __FILE__ are constants of their function
//#Expect: accept
//#Changed: where
//#Unchanged: elsewhere
//#Output-before: where elsewhere
//#Output-after: where! elsewhere
#include "case.h"

KEEP void where(void) { printf(SIDE("%s", "%s!"), __func__); }
KEEP void elsewhere(void) { printf(" %s", __func__); }

void answer(void)
{
	where();
	elsewhere();
}
