//#Rule: a macro changes its users
//#Expect: accept
//#Changed: left right
//#Unchanged: neither
//#Output-before: 10 20 0
//#Output-after: 11 22 0
#include "case.h"

#define FACTOR SIDE(10, 11)

KEEP int left(int a) { return a * FACTOR; }
KEEP int right(int a) { return FACTOR * a; }
KEEP int neither(int a) { return a - a; }

void answer(void) { printf("%d %d %d", left(1), right(2), neither(3)); }
