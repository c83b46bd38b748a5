//#Rule: hidden functions and data of another unit
//#Expect: accept
//#Flags: -fvisibility=hidden
//#Changed: value
//#Output-before: 6 | 6
//#Output-after: 12
#include "case.h"

extern int data;
int other(void);

KEEP int value(void) { return (other() + data) * SIDE(1, 2); }

__attribute__((visibility("default"))) void answer(void) { printf("%d", value()); }
//#Unit: other.c
#include "case.h"

int data = 5;
KEEP int other(void) { return 1 + 0 * data++ + 0 * data--; }
