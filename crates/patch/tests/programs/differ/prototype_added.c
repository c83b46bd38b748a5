//#Rule: a pointer to functions gains their parameters: all call them as before
//#Expect: accept
//#Changed: twice
//#Output-before: 14
//#Output-after: 15
//#Output-reverted: 14
#include "case.h"

#define PARAMETERS const char *, int
struct work { int (*run)(SIDE(, PARAMETERS)); int times; };

static int run(const char *text, int n) { return n + (int)strlen(text); }

KEEP int twice(struct work *w) { return w->times * w->run("abc", 4) + SIDE(0, 1); }

void answer(void)
{
	static struct work w = { run, 2 };

	printf("%d", twice(&w));
}
