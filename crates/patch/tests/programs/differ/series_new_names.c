//#Rule: the second patch of a series refers to what the first one added: a global, a static, a function
//#Expect: accept
//#Changed: next
//#Output-before: 1 | 2
//#Output-base: 1013 | 1024
//#Output-after: 2036 | 2047
//#Output-reverted: 1057
#include "case.h"

static int calls;
#ifdef SP_BASE
int total;
static int extra = 1000;
static KEEP int grow(int by) { return total += by; }
#endif

KEEP int next(void)
{
	calls++;
#ifdef SP_AFTER
	return grow(10) + calls + 2 * extra + 1;
#elif defined(SP_BASE)
	return grow(10) + calls + extra;
#else
	return calls;
#endif
}

void answer(void) { printf("%d", next()); }
