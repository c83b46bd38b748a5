//#Rule: the body of a lambda changes
//#Expect: accept
//#Changed: work(int)::*
//#Output-before: 6
//#Output-after: 16
#include "case.h"

KEEP int apply(int (*function)(int), int n) { return function(n); }

KEEP int work(int n)
{
	return apply([](int m) { return m * 2 + SIDE(0, 10); }, n);
}

void answer() { printf("%d", work(3)); }
