//#Rule: a change in a header changes two units that it does not touch
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: here there
//#Output-before: 2 3
//#Output-after: 3 4
#include "case.h"
#include "shared.h"

int there(void);
KEEP int here(void) { return bump(1); }

void answer(void) { printf("%d %d", here(), there()); }
//#Unit: other.c
#include "case.h"
#include "shared.h"

KEEP int there(void) { return bump(2); }
//#Header: shared.h
static inline int bump(int a) { return a + SIDE(1, 2); }
