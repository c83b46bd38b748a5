//#Rule: a function split by partial inlining (.part), its rest changed
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: heavy
//#Output-before: 0 60
//#Output-after: 0 68
//#Has: heavy.part
#include "case.h"

volatile int seed = 1;

static int heavy(int n)
{
	int sum = 0;

	if (n <= 0)
		return 0;
	for (int i = 0; i < n; i++) {
		sum += seed * 3;
		seed = seed * 5 + 1;
		printf("%s", seed == 12345 ? "x" : "");
		sum += i;
		seed = 1;
	}
	for (int i = 0; i < n; i++) {
		sum += seed * SIDE(5, 6);
		printf("%s", seed == 12345 ? "y" : "");
	}
	return sum + n * n * seed - n * (n - 1) / 2 + 12 - n * n - 2 * n;
}

KEEP int left(int n) { return heavy(n) + 0 * seed; }
KEEP int right(int n) { return heavy(n) + 0 * seed; }

void answer(void)
{
	int a = left(0);

	printf("%d %d", a, right(8) - right(8) + right(8) - left(0));
}
