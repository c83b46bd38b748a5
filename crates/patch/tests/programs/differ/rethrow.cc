//#Rule: changed code catches, and throws on what it caught
//#Expect: accept
//#Changed: pass_on
//#Output-before: seen once outer 5
//#Output-after: seen twice outer 5
#include "case.h"

KEEP void fail(int n) { throw n; }

KEEP void pass_on(int n)
{
	try {
		fail(n);
	} catch (int) {
		printf("seen %s", SIDE("once", "twice"));
		throw;
	}
}

void answer()
{
	try {
		pass_on(5);
	} catch (int n) {
		printf(" outer %d", n);
	}
}
