//#Rule: a function that loses its .isra shape changes its callers
//#Expect: accept
//#Opt: -O2 -O3
//#Output-before: 70
//#Output-after: 73
//#Changed: total
//#Has: weigh.isra
#include "case.h"

struct parcel { char name[64]; int weight; int count; };
volatile int zero;

static __attribute__((noinline)) int weigh(struct parcel *p)
{
	int sum = 0;

	for (int i = 0; i < p->count; i++)
		sum += p->weight + zero;
#ifdef SP_AFTER
	sum += (int)strlen(p->name);
	p->name[0] = (char)zero;
#line 29
#endif
	return sum;
}

KEEP int total(struct parcel *p) { return weigh(p); }

void answer(void)
{
	struct parcel p = { "box", 7, 10 };

	printf("%d", total(&p));
}
