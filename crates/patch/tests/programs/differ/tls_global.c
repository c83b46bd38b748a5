//#Rule: a global thread-local of another unit of the target
//#Expect: accept
//#Changed: next
//#Output-before: 8 | 9
//#Output-after: 19 | 29
//#Output-reverted: 30
#include "case.h"

extern __thread int calls;

KEEP int next(void) { return calls += SIDE(1, 10); }

void answer(void) { printf("%d", next()); }
//#Unit: other.c
#include "case.h"

__thread char before_it = 3;
__thread int calls = 7;

KEEP int reset(void) { return calls = before_it; }
