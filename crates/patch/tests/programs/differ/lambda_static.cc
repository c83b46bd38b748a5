//#Rule: a static variable of a lambda keeps its value when the lambda's number changes
//#Expect: accept
//#Changed: count
//#Output-before: 1 | 2
//#Output-after: 17 | 18
//#Output-reverted: 5 | 6
#include "case.h"

KEEP int apply(int (*function)(int), int n) { return function(n); }

KEEP int count()
{
	int offset = 0;
#ifdef SP_AFTER
	offset = apply([](int n) { asm volatile(""); return n * 14; }, 1);
#endif
	return apply([](int n) { static int calls; return calls += n; }, 1) + offset;
}

void answer() { printf("%d", count()); }
