//#Rule: a default argument changes: every caller is changed code
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: first second
//#Unchanged: scale
//#Output-before: 2 4
//#Output-after: 3 6
#include "case.h"

int scale(int n, int factor = SIDE(2, 3));
KEEP int first() { return scale(1); }
KEEP int second() { return scale(2); }
KEEP int scale(int n, int factor)
{
	asm volatile("");
	return n * factor;
}

void answer()
{
	int a = first();

	printf("%d %d", a, second());
}
