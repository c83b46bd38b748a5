//#Rule: a function that gains a .cold part
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: check
//#Output-before: fine, fine,
//#Output-after: fine, failed 3
//#Has: check.cold
#include "case.h"

extern volatile int sink;
volatile int sink;
__attribute__((cold, noinline)) void fail(int code) { printf("failed %d", code); }

KEEP void check(int value)
{
#ifdef SP_AFTER
	if (value < 0) {
		sink = value;
		fail(3);
		return;
	}
#line 28
#endif
	printf(sink == 99 ? "never" : value > 0 ? "fine, " : "fine,");
}

void answer(void)
{
	check(1);
	check(-1);
}
