//#Rule: a static local with a constructor keeps its value: it is not made again
//#Expect: accept
//#Changed: next
//#Has: _ZGVZ
//#Output-before: made 1 | 2
//#Output-after: now 3 | now 4
//#Output-reverted: 5 | 6
#include "case.h"

struct Count {
	int value;
	Count();
};
KEEP Count::Count() : value(0) { printf("made "); }

KEEP void next()
{
	static Count count;

	count.value++;
	printf("%s%d", SIDE("", "now "), count.value);
}

void answer() { next(); }
