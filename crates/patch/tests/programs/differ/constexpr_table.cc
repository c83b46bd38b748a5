//#Rule: a constexpr table changes: the code that reads it brings the new one
//#Expect: accept
//#Changed: look
//#Output-before: 20
//#Output-after: 25
#include "case.h"

static constexpr int table[] = {10, 15, SIDE(20, 25), 30};

KEEP int look(int n) { return table[n & 3]; }

void answer() { printf("%d", look(2)); }
