//#Rule: a variable that grows is refused
//#Expect: refuse variable-changed
//#Refusal: `history`
//#Output-before: 1
#include "case.h"

static int history[SIDE(4, 8)];
static unsigned at;

KEEP int push(int value)
{
	history[at++ % (sizeof history / sizeof *history)] = value;
	return history[0];
}

void answer(void) { printf("%d", push(1)); }
