//#Rule: a thread-local of the unit, read and written
//#Expect: accept
//#Changed: next
//#Output-before: 8 | 9
//#Output-after: 19 | 29
//#Output-reverted: 30
//#Has: .tdata
#include "case.h"

static __thread int before_it = 3;
static __thread int calls = 7;

KEEP int next(void) { return calls += SIDE(1, 10); }
KEEP int other(void) { return before_it++; }

void answer(void)
{
	printf("%d", next());
	other();
}
