//#Rule: operators of a class change, and its own new and delete stay
//#Expect: accept
//#Changed: operator+ Big::operatorint
//#Output-before: 5 1 1
//#Output-after: 15 1 1
#include "case.h"
#include <new>

static int made, gone;

struct Big {
	int n;
	operator int() const;
	static void *operator new(std::size_t size);
	static void operator delete(void *p);
};
KEEP Big::operator int() const { return n + SIDE(0, 1); }
KEEP void *Big::operator new(std::size_t size)
{
	made++;
	return malloc(size);
}
KEEP void Big::operator delete(void *p)
{
	gone++;
	free(p);
}
KEEP Big operator+(const Big &a, const Big &b) { return Big{a.n + b.n + SIDE(0, 9)}; }

void answer()
{
	made = gone = 0;
	Big *two = new Big{2};
	Big sum = *two + Big{3};

	printf("%d", int(sum));
	delete two;
	printf(" %d %d", made, gone);
}
