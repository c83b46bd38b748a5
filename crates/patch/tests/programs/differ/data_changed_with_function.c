//#Rule: changed initialised data is refused also when all its users change
//#Expect: refuse data-changed
//#Refusal: `limits`
//#Output-before: 10
#include "case.h"

static int limits[2] = { SIDE(10, 20), 30 };

KEEP int get(int i) { return limits[i] + SIDE(0, 1) + limits[1]++ - limits[1] + 1; }

void answer(void) { printf("%d", get(0)); }
