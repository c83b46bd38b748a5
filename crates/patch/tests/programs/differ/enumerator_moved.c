//#Rule: an enumerator with another value is refused
//#Expect: refuse type-layout-changed
//#Refusal: type `enum state` changed: enumerator `DONE` changed from 1 to 2
//#Output-before: done
#include "case.h"

#ifdef SP_AFTER
enum state { OPEN, WAIT, DONE };
#else
enum state { OPEN, DONE };
#endif

KEEP const char *name(enum state s) { return s == DONE ? "done" : "open"; }

void answer(void) { printf("%s", name(DONE)); }
