//#Rule: a pointer to functions gains a parameter that is passed otherwise without a prototype
//#Expect: refuse type-layout-changed
//#Refusal: member `run` at offset 0x0 changed from
//#Output-before: 14
#include "case.h"

struct work { int (*run)(SIDE(, float)); int times; };

KEEP int twice(struct work *w) { return w->times * 7 + (w->run ? w->run(1) : 0); }

void answer(void)
{
	static struct work w = { 0, 2 };

	printf("%d", twice(&w));
}
