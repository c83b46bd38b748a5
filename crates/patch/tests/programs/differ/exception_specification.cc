//#Rule: changed code that is noexcept and calls what may throw: its table says so
//#Expect: accept
//#Changed: quiet
//#Output-before: 3
//#Output-after: 4
#include "case.h"

KEEP int maybe(int n)
{
	if (n < 0)
		throw n;
	return n;
}

KEEP int quiet(int n) noexcept { return maybe(n) + SIDE(1, 2); }

void answer() { printf("%d", quiet(2)); }
