//#Rule: an alias has the entry of its function
//#Expect: accept
//#Changed: original
//#Output-before: 1 1
//#Output-after: 2 2
#include "case.h"

__attribute__((noipa)) int original(void) { return SIDE(1, 2); }
int other_name(void) __attribute__((alias("original")));

void answer(void) { printf("%d %d", original(), other_name()); }
