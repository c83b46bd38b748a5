//#Rule: an enumerator with another value is refused where data may hold it
//#Expect: refuse type-layout-changed
//#Refusal: type `enum state` changed: enumerator `DONE` changed from 1 to 2
//#Refusal: variable `current` may hold it
//#Output-before: done
#include "case.h"

#ifdef SP_AFTER
enum state { OPEN, WAIT, DONE };
#else
enum state { OPEN, DONE };
#endif

static volatile enum state current = OPEN;

KEEP void finish(void) { current = DONE; }
KEEP const char *name(void) { return current == DONE ? "done" : "open"; }

void answer(void)
{
	finish();
	printf("%s", name());
}
