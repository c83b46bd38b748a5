//#Rule: changed constant data whose only user is otherwise unchanged changes that user
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: pick
//#Output-before: 11 22 33
//#Output-after: 12 24 36
#include "case.h"

static const int table[] = { SIDE(11, 12), SIDE(22, 24), SIDE(33, 36) };

KEEP int pick(int i) { return table[i]; }

void answer(void) { printf("%d %d %d", pick(0), pick(1), pick(2)); }
