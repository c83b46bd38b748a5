//#Rule: members that change places are refused
//#Expect: refuse type-layout-changed
//#Refusal: member `x` moved from offset 0x0 to 0x4
//#Output-before: 1 2
#include "case.h"

struct point { int SIDE(x, y), SIDE(y, x); };

static struct point *saved;
KEEP struct point *point(void)
{
	if (!saved) {
		saved = malloc(sizeof *saved);
		saved->x = 1;
		saved->y = 2;
	}
	return saved;
}

void answer(void) { printf("%d %d", point()->x, point()->y); }
