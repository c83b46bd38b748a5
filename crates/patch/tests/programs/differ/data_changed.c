//#Rule: changed initialised data is refused: the running program has its own values
//#Expect: refuse data-changed
//#Refusal: `limit`
//#Output-before: 10
#include "case.h"

static volatile int limit = SIDE(10, 20);

KEEP int get(void) { return limit; }

void answer(void) { printf("%d", get()); }
