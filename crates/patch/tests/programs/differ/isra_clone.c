//#Rule: a static function whose parameters the compiler took apart (.isra)
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: weigh
//#Output-before: 70
//#Output-after: 71
//#Has: weigh.isra
#include "case.h"

struct parcel { char name[64]; int weight; int count; };
volatile int zero;

static __attribute__((noinline)) int weigh(const struct parcel *p)
{
	int sum = SIDE(0, 1);

	for (int i = 0; i < p->count; i++)
		sum += p->weight + zero;
	return sum;
}

KEEP int total(struct parcel *p) { return weigh(p); }

void answer(void)
{
	struct parcel p = { "box", 7, 10 };

	printf("%d", total(&p));
}
