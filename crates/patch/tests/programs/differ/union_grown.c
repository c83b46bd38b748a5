//#Rule: a union that grows is refused
//#Expect: refuse type-layout-changed
//#Refusal: type `union value` changed
//#Output-before: 4
#include "case.h"

union value { int i; SIDE(, char text[16];) };
static union value values[2] = { { 4 }, { 5 } };

KEEP int get(int i) { return values[i].i SIDE(, + values[i].text[8]); }

void answer(void) { printf("%d", get(0)); }
