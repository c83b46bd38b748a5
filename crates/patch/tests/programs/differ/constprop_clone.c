//#Rule: a clone for a constant argument (.constprop) follows its parent
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: scale
//#Output-before: 12 12
//#Output-after: 13 13
//#Has: scale.constprop
#include "case.h"

volatile int zero;

static __attribute__((noinline)) int scale(int value, int factor)
{
	int sum = SIDE(0, 1);

	for (int i = 0; i < factor; i++)
		sum += value + zero;
	return sum;
}

KEEP int left(int v) { return scale(v, 4); }
KEEP int right(int v) { return scale(v, 4); }

void answer(void) { printf("%d %d", left(3), right(3)); }
