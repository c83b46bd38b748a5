//#Rule: functions that the linker left out do not stand in the way
//#Expect: accept
//#Flags: -ffunction-sections -fdata-sections
//#Libs: -Wl,--gc-sections
//#Link: pie nopie
//#Changed: value
//#Output-before: 1
//#Output-after: 2
#include "case.h"

static int unused_data[100] = { 1 };
KEEP int never_called(int i) { return unused_data[i]++ + 17; }

KEEP int value(void) { return SIDE(1, 2); }

void answer(void) { printf("%d", value()); }
