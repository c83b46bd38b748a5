//#Rule: a generic lambda changes in all its instances
//#Expect: accept
//#Output-before: 5 5.5
//#Output-after: 7 7.5
//#Changed: work
//#Opt: -O2 -O3
#include "case.h"

KEEP double work(int a, double b, int which)
{
	auto add = [](auto x) { return x + SIDE(1, 3); };

	return which ? add(b) : add(a);
}

void answer()
{
	double first = work(4, 4.5, 0);

	printf("%.0f %.1f", first, work(4, 4.5, 1));
}
