//#Rule: data of libc that the target did not use, reached directly: there is no copy of it to reach
//#Expect: refuse unresolved-symbol
//#Link: pie nopie
//#Refusal: `opterr`
//#Output-before: 1
#include "case.h"

extern int opterr;

KEEP int value(void) { return 1 + SIDE(0, opterr); }

void answer(void) { printf("%d", value()); }
