//#Rule: string sections are compared by content
//#Expect: accept
//#Changed: greeting
//#Unchanged: other
//#Output-before: hello, same
//#Output-after: good day, same
#include "case.h"

KEEP const char *greeting(void) { return SIDE("hello", "good day"); }
KEEP const char *other(void) { return "same"; }

void answer(void) { printf("%s, %s", greeting(), other()); }
