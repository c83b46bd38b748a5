//#Rule: a bit-field of another width is refused
//#Expect: refuse type-layout-changed
//#Refusal: member `kind` changed from 3 to 4 bits
//#Output-before: 5 1
#include "case.h"

struct flags { unsigned kind : SIDE(3, 4); unsigned on : 1; };

KEEP unsigned kind(struct flags *f) { return f->kind; }
KEEP unsigned on(struct flags *f) { return f->on; }

void answer(void)
{
	struct flags f = { 5, 1 };

	printf("%u %u", kind(&f), on(&f));
}
