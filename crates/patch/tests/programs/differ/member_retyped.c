//#Rule: a member of another type is refused, offsets or not
//#Expect: refuse type-layout-changed
//#Refusal: member `size` at offset 0x4 changed from int to float
//#Output-before: 3
#include "case.h"

struct item { int id; SIDE(int, float) size; };

KEEP int size(struct item *i) { return (int)i->size; }

void answer(void)
{
	struct item i = { 1, 3 };

	printf("%d", size(&i));
}
