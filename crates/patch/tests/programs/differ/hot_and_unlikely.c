//#Rule: functions in .text.hot and .text.unlikely
//#Expect: accept
//#Changed: often seldom
//#Output-before: 1 2
//#Output-after: 3 4
//#Has: .text.hot
//#Has: .text.unlikely
#include "case.h"

__attribute__((hot)) KEEP int often(void) { return SIDE(1, 3); }
__attribute__((cold)) KEEP int seldom(void) { return SIDE(2, 4); }

void answer(void) { printf("%d %d", often(), seldom()); }
