//#Rule: a tail call to another function
//#Expect: accept
//#Changed: route
//#Output-before: left 3
//#Output-after: right 3
#include "case.h"

KEEP void left(int n) { printf("left %d", n); }
KEEP void right(int n) { printf("right %d", n); }
KEEP void route(int n) { SIDE(left, right)(n + 1); }

void answer(void) { route(2); }
