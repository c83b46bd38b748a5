//#Rule: a constant structure copied by the compiler from read-only data
//#Expect: accept
//#Changed: make
//#Output-before: 10 20 30 40 50 60
//#Output-after: 10 20 30 40 50 66
#include "case.h"

struct six { long a, b, c, d, e, f; };

KEEP void make(struct six *out)
{
	const struct six s = { 10, 20, 30, 40, 50, SIDE(60, 66) };

	*out = s;
}

void answer(void)
{
	struct six s;

	make(&s);
	printf("%ld %ld %ld %ld %ld %ld", s.a, s.b, s.c, s.d, s.e, s.f);
}
