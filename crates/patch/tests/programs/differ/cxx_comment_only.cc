//#Rule: comments, names of parameters and of a lambda's captures change nothing
//#Expect: nothing
//#Output-before: 7
#include "case.h"

template <class T> KEEP T add(T SIDE(a, first), T b) { return SIDE(a, first) + b; }

KEEP int work(int SIDE(n, number))
{
	auto add_it = [SIDE(n, number)](int m) { return add(SIDE(n, number), m); };

	return add_it(3); /* as before */
}

void answer() { printf("%d", work(4)); }
