//#Rule: strings merged by their tails are told apart by content
//#Expect: accept
//#Changed: whole
//#Unchanged: tail
//#Output-before: underground ground
//#Output-after: playground ground
//#Has: .rodata.str1.1
#include "case.h"

KEEP const char *whole(void) { return SIDE("underground", "playground"); }
KEEP const char *tail(void) { return "ground"; }

void answer(void) { printf("%s %s", whole(), tail()); }
