//#Rule: an alternative added to a union that does not grow is accepted
//#Expect: accept
//#Changed: get
//#Warning: union value: alternative `c` added
//#Output-before: 260
//#Output-after: 4
#include "case.h"

union value { int i; SIDE(, unsigned char c;) };
static union value values[2] = { { 260 }, { 5 } };

KEEP int get(int i) { return SIDE(values[i].i, values[i].c); }
KEEP void set(int i, int to) { values[i].i = to; }

void answer(void)
{
	printf("%d", get(0));
	set(1, 2);
}
