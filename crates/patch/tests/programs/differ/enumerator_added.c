//#Rule: an enumerator added at the end is accepted, and said
//#Expect: accept
//#Changed: name
//#Warning: enum state: enumerator `LATE` = 2 added
//#Output-before: done ?
//#Output-after: done late
#include "case.h"

enum state { OPEN, DONE, SIDE(, LATE) };

KEEP const char *name(enum state s)
{
	switch ((int)s) {
	case OPEN: return "open";
	case DONE: return "done";
#ifdef SP_AFTER
	case LATE: return "late";
#endif
	}
	return "?";
}

void answer(void) { printf("%s %s", name(DONE), name((enum state)2)); }
