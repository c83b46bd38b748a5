//#Rule: a new use of a string and a constant that old code has as well
//#Expect: accept
//#Changed: second
//#Unchanged: first
//#Output-before: x 5 - 0
//#Output-after: x 5 x 5
#include "case.h"

static const int five = 5;
static const int *const pointer = &five;

KEEP void first(void) { printf("%s %d ", "x", *pointer); }
KEEP void second(void) { SIDE(printf("- 0"), printf("%s %d", "x", *pointer)); }

void answer(void)
{
	first();
	second();
}
