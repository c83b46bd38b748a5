//#Rule: a type that is new on the after side is fine
//#Expect: accept
//#Changed: total
//#Output-before: 3
//#Output-after: 33
#include "case.h"

#ifdef SP_AFTER
struct pair { int a, b; };
static KEEP struct pair split(int n) { return (struct pair){ n * 10, n }; }
KEEP int total(int n)
{
	struct pair p = split(n);

	return p.a + p.b;
}
#line 24
#else
KEEP int total(int n) { return n; }
#line 24
#endif

void answer(void) { printf("%d", total(3)); }
