//#Rule: frames by rbp, and functions aligned to 32
//#Expect: accept
//#Flags: -fno-omit-frame-pointer -falign-functions=32
//#Changed: value
//#Output-before: 6
//#Output-after: 7
#include "case.h"

KEEP int value(int n)
{
	volatile char room[40];

	room[n] = (char)n;
	return room[n] + SIDE(0, 1);
}

void answer(void) { printf("%d", value(6)); }
