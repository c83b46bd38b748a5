//#Rule: a new static object has a constructor, which nobody would call
//#Expect: refuse init-array
//#Refusal: .init_array
//#Output-before: 3
#include "case.h"

KEEP int three()
{
	int n = 3;

	asm volatile("" : "+r"(n));
	return n;
}
#ifdef SP_AFTER
static int number = three();
#endif

KEEP int get() { return SIDE(three(), number); }

void answer() { printf("%d", get()); }
