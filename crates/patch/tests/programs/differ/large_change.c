//#Rule: new code larger than the old function
//#Expect: accept
//#Changed: work
//#Output-before: 1
//#Output-after: 4950 99 c
#include "case.h"

#ifdef SP_AFTER
KEEP void work(void)
{
	int list[100], sum = 0;
	char text[32];

	for (int i = 0; i < 100; i++)
		list[i] = i;
	for (int i = 0; i < 100; i++)
		sum += list[i];
	snprintf(text, sizeof text, "%d %d %c", sum, list[99], "abc"[2]);
	printf("%s", text);
}
#else
KEEP void work(void) { printf("1"); }
#endif

void answer(void) { work(); }
