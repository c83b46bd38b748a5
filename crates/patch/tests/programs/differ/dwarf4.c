//#Rule: DWARF 4 is read as well
//#Expect: refuse type-layout-changed
//#Flags: -gdwarf-4
//#Refusal: member `b` added at offset 0x4
//#Output-before: 1
#include "case.h"

struct s { int a; SIDE(, int b;) };

KEEP int value(struct s *s) { return s->a SIDE(, + s->b); }

void answer(void)
{
	struct s s[2] = { { 1 } };

	printf("%d", value(s));
}
