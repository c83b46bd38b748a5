//#Rule: a recursive function: all frames of one call are of one version
//#Expect: accept
//#Changed: depth
//#Output-before: 10
//#Output-after: 20
#include "case.h"

KEEP int depth(int n) { return n == 0 ? 0 : depth(n - 1) + SIDE(1, 2); }

void answer(void) { printf("%d", depth(10)); }
