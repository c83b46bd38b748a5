//#Rule: a thread may stay in a changed function that it never leaves, with the old version, which generations can do
//#Expect: accept
//#May-stay: serve
//#Changed: serve work
//#Unchanged: other
//#Output-before: 10 20
//#Output-after: 11 21
//#Live: refused lets threads stay in serve
#include "case.h"

KEEP int other(int x) { return 2 * x; }
KEEP int work(int x) { return x + SIDE(0, 1); }
KEEP int serve(int x) { return other(x) + SIDE(0, 1); }

void answer(void)
{
	int a = work(10);

	printf("%d %d", a, serve(10));
}
