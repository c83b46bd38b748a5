//#Rule: references, moved values and pointers to members cross the change
//#Patchable: no
//#Expect: accept
//#Changed: take
//#Output-before: 3 4 3
//#Output-after: 13 4 3
#include "case.h"

struct Pair {
	int a, b;
	int sum() const { return a + b; }
};

KEEP int take(Pair &&pair, int Pair::*member, int (Pair::*method)() const, const int &more)
{
	int result = (pair.*method)() + more + SIDE(0, 10);

	pair.*member = 0;
	return result;
}

void answer()
{
	Pair pair = {1, 1};
	int result = take(static_cast<Pair &&>(pair), &Pair::a, &Pair::sum, 1);

	printf("%d %d %d", result, pair.a + 4, pair.b + 2);
}
