//#Rule: calls through the GOT without a PLT (-fno-plt)
//#Expect: accept
//#Flags: -fno-plt
//#Changed: length
//#Output-before: 5
//#Output-after: 4
#include "case.h"

KEEP size_t length(const char *text, int c) { return SIDE(strlen(text), (size_t)(strchr(text, c) - text)); }

void answer(void) { printf("%zu", length("abcde", 'e')); }
