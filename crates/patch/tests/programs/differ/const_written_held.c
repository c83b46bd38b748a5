//#Rule: a constant that code may read through a stored pointer is refused, also with the author's permission
//#Expect: refuse data-changed
//#Refusal: `limits`
//#Refusal: through `holder`
//#Data: limits
//#Output-before: 20
#include "case.h"

const int limits[] = { 10, SIDE(20, 21) };
static const int *volatile holder = limits;

KEEP int get(int i) { return holder[i]; }

void answer(void) { printf("%d", get(1)); }
