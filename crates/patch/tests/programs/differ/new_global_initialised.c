//#Rule: a new initialised static, and a pointer in it that must be relocated
//#Expect: accept
//#Changed: next
//#Output-before: start
//#Output-after: a | b | a
//#Output-reverted: start
#include "case.h"

#ifdef SP_AFTER
static const char *names[] = { "a", "b" };
static int at = 1;
#endif
KEEP const char *next(void) { return SIDE("start", names[at ^= 1]); }

void answer(void) { printf("%s", next()); }
