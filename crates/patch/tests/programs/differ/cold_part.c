//#Rule: a change in the .cold part is a change of its parent
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: check
//#Output-before: fine, failed 1
//#Output-after: fine, failed 2
//#Has: check.cold
#include "case.h"

static __attribute__((cold, noipa)) void fail(int code) { printf("failed %d", code); }

KEEP void check(int value)
{
	if (__builtin_expect(value < 0, 0)) {
		fail(SIDE(1, 2));
		return;
	}
	printf("fine, ");
}

void answer(void)
{
	check(1);
	check(-1);
}
