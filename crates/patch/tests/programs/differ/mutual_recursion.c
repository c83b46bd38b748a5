//#Rule: two functions that call each other change together
//#Expect: accept
//#Changed: even odd
//#Output-before: e o e o e
//#Output-after: E O E O E
#include "case.h"

void odd(int n);
KEEP void even(int n)
{
	printf(SIDE("e", "E"));
	if (n > 0)
		odd(n - 1);
}
KEEP void odd(int n)
{
	printf(SIDE(" o ", " O "));
	if (n > 0)
		even(n - 1);
}

void answer(void) { even(4); }
