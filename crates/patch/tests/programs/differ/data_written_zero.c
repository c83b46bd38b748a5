//#Rule: a variable that was zero gets an initial value, and the other way round
//#Expect: accept
//#Data: limit offset
//#Output-before: 0 3
//#Output-after: 5 0
#include "case.h"

static volatile int limit SIDE(, = 5);
static volatile int offset SIDE(= 3, );

KEEP int get(void) { return limit; }
KEEP int shift(void) { return offset; }

void answer(void) { printf("%d %d", get(), shift()); }
