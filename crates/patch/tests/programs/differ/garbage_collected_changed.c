//#Rule: a change in a function that the linker left out concerns nobody, and is said
//#Expect: refuse unplaced-function
//#Flags: -ffunction-sections -fdata-sections
//#Libs: -Wl,--gc-sections
//#Link: pie nopie
//#Refusal: `never_called`
//#Output-before: 1
#include "case.h"

static int unused_data[100] = { 1 };
KEEP int never_called(int i) { return unused_data[i]++ + SIDE(17, 18); }

KEEP int value(void) { return SIDE(1, 2); }

void answer(void) { printf("%d", value()); }
