//#Rule: an enumerator gets another value, and only frames hold it: functions that stay must be off the stack
//#Expect: accept
//#Changed: name after
//#Unchanged: same
//#Warning: enumerator `DONE` changed from 1 to 2: no data has this type
//#Output-before: done 1
//#Output-after: done 2
#include "case.h"

#ifdef SP_AFTER
enum state { OPEN, WAIT, DONE };
#else
enum state { OPEN, DONE };
#endif

KEEP enum state after(enum state s) { return s == OPEN ? DONE : OPEN; }
KEEP enum state same(enum state s) { return s; }
KEEP const char *name(enum state s) { return s == DONE ? "done" : "open"; }

void answer(void)
{
	enum state s = same(after(OPEN));

	printf("%s %d", name(s), (int)s);
}
