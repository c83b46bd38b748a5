//#Rule: changed constant data that only changed functions use comes with them
//#Expect: accept
//#Changed: pick
//#Output-before: 11 22 33
//#Output-after: 12 24 36 48
#include "case.h"

static const int table[] = { SIDE(11, 12), SIDE(22, 24), SIDE(33, 36), SIDE(0, 48) };

KEEP void pick(int count)
{
	for (int i = 0; i < count + SIDE(0, 1); i++)
		printf(i ? " %d" : "%d", table[i]);
}

void answer(void) { pick(3); }
