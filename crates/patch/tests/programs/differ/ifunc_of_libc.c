//#Rule: an indirect function of libc (strcmp) is called through the value that the target bound
//#Expect: accept
//#Flags: -fno-builtin
//#Changed: compare
//#Output-before: 1 0
//#Output-after: 0 1
#include "case.h"

KEEP int compare(const char *a, const char *b) { return SIDE(strcmp(a, b) == 0, strcmp(a, b) != 0); }

void answer(void) { printf("%d %d", compare("same", "same"), compare("one", "two")); }
