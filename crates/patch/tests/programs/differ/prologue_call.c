//#Rule: a prologue with a call among its first five bytes
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: wrapped
//#Output-before: 3
//#Output-after: 4
#include "case.h"

volatile int state = 1;
KEEP int touch(void) { return ++state; }

KEEP int wrapped(void)
{
	int a = touch();

	return a + touch() - state - state + SIDE(4, 5);
}

void answer(void)
{
	state = 1;
	printf("%d", wrapped());
}
