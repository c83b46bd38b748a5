//#Rule: a type behind a pointer in a member counts as well
//#Expect: refuse type-layout-changed
//#Refusal: type `struct leaf` changed: member `value` moved from offset 0x0 to 0x4
//#Output-before: 9
#include "case.h"

struct leaf { SIDE(, int fresh;) int value; };
struct tree { struct tree *left; struct leaf *leaf; };

KEEP int value(struct tree *t) { return t->left->leaf->value; }

void answer(void)
{
	struct leaf l = { .value = 9 };
	struct tree inner = { NULL, &l }, outer = { &inner, NULL };

	printf("%d", value(&outer));
}
