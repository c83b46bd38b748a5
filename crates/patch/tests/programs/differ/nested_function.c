//#Rule: a nested function (GNU C) called by the static chain
//#Expect: accept
//#Changed: total
//#Output-before: 12
//#Output-after: 24
#include "case.h"

KEEP int total(int n)
{
	int factor = SIDE(1, 2), sum = 0;

	__attribute__((noinline)) void add(int i) { sum += i * factor; }
	for (int i = 0; i < n; i++)
		add(i + 2);
	return sum - factor * (n - 3) * 3;
}

void answer(void) { printf("%d", total(4) - 1 * SIDE(-1, -2)); }
