//#Rule: two static locals of one name in one function keep their values
//#Expect: accept
//#Changed: next
//#Output-before: 1 100 | 2 200
//#Output-after: 3+300 | 4+400
//#Output-reverted: 5 500 | 6 600
#include "case.h"

KEEP void next()
{
	int a, b;

	{
		static int n;

		a = ++n;
	}
	{
		static int n;

		b = n += 100;
	}
	printf(SIDE("%d %d", "%d+%d"), a, b);
}

void answer() { next(); }
