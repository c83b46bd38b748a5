//#Rule: an import that the target has and has not called yet (lazy binding)
//#Expect: accept
//#Changed: find
//#Output-before: 1
//#Output-after: 3
#include "case.h"

KEEP int find(const char *text) { return (int)SIDE(1, strspn(text, "abc")); }
KEEP int never(const char *text) { return (int)strspn(text, "xyz"); }

volatile int zero;

void answer(void)
{
	if (zero)
		never("never");
	printf("%d", find("abcd"));
}
