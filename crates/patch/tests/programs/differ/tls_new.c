//#Rule: a new thread-local is refused: running threads have no room for it
//#Expect: refuse new-thread-local
//#Refusal: `calls`
//#Output-before: 5
#include "case.h"

#ifdef SP_AFTER
static __thread int calls;
#endif

KEEP int next(void) { return 5 + SIDE(0, ++calls); }

void answer(void) { printf("%d", next()); }
