//#Rule: a weak reference that nothing defines stays null
//#Expect: accept
//#Changed: value
//#Output-before: absent 1
//#Output-after: absent 2
#include "case.h"

extern void nobody_defines_this(void) __attribute__((weak));

KEEP void value(void)
{
	if (nobody_defines_this)
		nobody_defines_this();
	printf("%s %d", nobody_defines_this ? "there" : "absent", SIDE(1, 2));
}

void answer(void) { value(); }
