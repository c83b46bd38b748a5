//#Rule: changed code reaches a thread-local of its own unit
//#Expect: accept
//#Changed: next
//#Output-before: 1 | 2
//#Output-after: 12 | 22
//#Output-reverted: 23 | 24
#include "case.h"

static thread_local int mine;

KEEP int next() { return mine += SIDE(1, 10); }

void answer() { printf("%d", next()); }
