//#Rule: a new thread_local: running threads have no room for it
//#Expect: refuse new-thread-local
//#Refusal: new thread-local variable `mine`
//#Output-before: 0
#include "case.h"

#ifdef SP_AFTER
static thread_local int mine;
#endif

KEEP int next() { return SIDE(0, ++mine); }

void answer() { printf("%d", next()); }
