//#Rule: a function of libc that the target did not import
//#Expect: accept
//#Changed: find
//#Output-before: 0
//#Output-after: 4
#include "case.h"

KEEP int find(const char *text) 
{
	ROOM;
	return SIDE(0, (int)strcspn(text, "xyz"));
}

void answer(void) { printf("%d", find("pathxy")); }
