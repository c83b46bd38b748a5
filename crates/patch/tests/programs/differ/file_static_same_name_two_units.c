//#Rule: file statics of one name in two units stay apart
//#Expect: accept
//#Changed: second
//#Unchanged: first
//#Output-before: 11 101 | 12 102
//#Output-after: 13 112 | 14 122
//#Output-reverted: 15 123
#include "case.h"

static int state = 10;

int second(void);
KEEP int first(void) { return ++state; }

void answer(void)
{
	int a = first();

	printf("%d %d", a, second());
}
//#Unit: other.c
#include "case.h"

static int state = 100;

KEEP int second(void) { return state += SIDE(1, 10); }
