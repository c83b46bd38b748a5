//#Rule: equal statics folded to one address, and only one of them changes
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: through_left
//#Output-before: 10 10
//#Output-after: 20 10
//#Folded: left right
#include "case.h"

volatile int base = 5;

static __attribute__((noinline)) int left(int n)
{
	int sum = 0;

	for (int i = 0; i < n; i++)
		sum += base * SIDE(1, 2);
	return sum;
}

static __attribute__((noinline)) int right(int n)
{
	int sum = 0;

	for (int i = 0; i < n; i++)
		sum += base * 1;
	return sum;
}

KEEP int through_left(int n) { return left(n); }
KEEP int through_right(int n) { return right(n) + (base & 64); }

void answer(void)
{
	int a = through_left(2);

	printf("%d %d", a, through_right(2));
}
