//#Rule: data of libc that the target did not use, reached through the GOT
//#Expect: accept
//#Link: shared
//#Changed: value
//#Output-before: 1
//#Output-after: 2
#include "case.h"

extern int opterr;

KEEP int value(void) { return 1 + SIDE(0, opterr); }

void answer(void) { printf("%d", value()); }
