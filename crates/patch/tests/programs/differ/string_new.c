//#Rule: a new string in front of old ones renumbers .LC names and changes nobody else
//#Expect: accept
//#Changed: first
//#Unchanged: second third
//#Output-before: a b c
//#Output-after: new a b c
#include "case.h"

KEEP void first(void)
{
#ifdef SP_AFTER
	printf("new ");
#line 17
#endif
	printf("%s ", "a");
}
KEEP const char *second(void) { return "b"; }
KEEP const char *third(void) { return "c"; }

void answer(void)
{
	first();
	printf("%s %s", second(), third());
}
