//#Rule: atomic operations on old data
//#Expect: accept
//#Changed: add
//#Output-before: 1 | 2
//#Output-after: 7
//#Output-reverted: 8
#include "case.h"
#include <stdatomic.h>

static atomic_int counter;

KEEP int add(void) { return atomic_fetch_add(&counter, SIDE(1, 5)) + SIDE(1, 5); }

void answer(void) { printf("%d", add()); }
