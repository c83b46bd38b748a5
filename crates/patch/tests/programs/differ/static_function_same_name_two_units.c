//#Rule: static functions of one name in two units stay apart
//#Expect: accept
//#Changed: helper
//#Output-before: 1 2
//#Output-after: 1 3
#include "case.h"

int second(void);
static KEEP int helper(void) { return 1; }

void answer(void) { printf("%d %d", helper(), second()); }
//#Unit: other.c
#include "case.h"

static KEEP int helper(void) { return SIDE(2, 3); }

int second(void) { return helper(); }
