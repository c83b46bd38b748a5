//#Rule: a table of pointers whose rows change is refused
//#Expect: refuse data-changed
//#Refusal: `table`
//#Output-before: 1 2
#include "case.h"

KEEP int get(void) { return 1; }
KEEP int set(void) { return 2; }
int (*table[])(void) = { SIDE(get, set), set };

void answer(void) { printf("%d %d", table[0](), table[1]()); }
