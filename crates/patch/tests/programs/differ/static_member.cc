//#Rule: changed code reaches static members of a class and of a class template
//#Expect: accept
//#Changed: Counter::next
//#Output-before: 1 2 | 2 4
//#Output-after: 12 6 | 22 8
//#Output-reverted: 23 10 | 24 12
#include "case.h"

template <class T> struct Total {
	static T sum;
};
template <class T> T Total<T>::sum = 0;

struct Counter {
	static int calls;
	static int next();
};
int Counter::calls;
KEEP int Counter::next()
{
	Total<long>::sum += 2;
	return calls += SIDE(1, 10);
}

void answer()
{
	int calls = Counter::next();

	printf("%d %ld", calls, Total<long>::sum);
}
