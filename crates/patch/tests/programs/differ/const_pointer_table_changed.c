//#Rule: a constant table of strings, one of them changed
//#Expect: accept
//#Changed: name
//#Output-before: red green blue
//#Output-after: red lime blue
//#Has: .data.rel.ro.local
#include "case.h"

static const char *const names[] = { "red", SIDE("green", "lime"), "blue" };

KEEP const char *name(int i) { return names[i]; }

void answer(void) { printf("%s %s %s", name(0), name(1), name(2)); }
