//#Rule: a table of pointers to a patched function keeps the old entry, where the jump is
//#Expect: accept
//#Changed: get
//#Unchanged: set
//#Output-before: 1 2
//#Output-after: 10 2
#include "case.h"

KEEP int get(void) { return SIDE(1, 10); }
KEEP int set(void) { return 2; }
int (*const table[])(void) = { get, set };
int (*const *volatile rows)(void) = table;

void answer(void) { printf("%d %d", rows[0](), rows[1]()); }
