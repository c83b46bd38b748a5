//#Rule: new functions that call each other and an old one
//#Expect: accept
//#Changed: total
//#Unchanged: old
//#Output-before: 4
//#Output-after: 24
#include "case.h"

KEEP int old(int n) { return n; }
#ifdef SP_AFTER
static KEEP int left(int n);
static KEEP int right(int n) { return n <= 1 ? old(1) : old(n) * left(n - 1); }
static KEEP int left(int n) { return n <= 1 ? old(1) : old(n) * right(n - 1); }
#endif
KEEP int total(int n) { return SIDE(old(n), left(n)); }

void answer(void) { printf("%d", total(4)); }
