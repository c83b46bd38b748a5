//#Rule: one of several overloads changes, another is new
//#Expect: accept
//#Changed: describe call
//#Output-before: int 1 text x
//#Output-after: number 1.5 text x
#include "case.h"

KEEP void describe(int n) { printf("%s %d", SIDE("int", "number"), n); }
KEEP void describe(const char *text) { printf(" text %s", text); }
#ifdef SP_AFTER
KEEP void describe(double n) { printf("number %.1f", n); }
#endif

KEEP void call()
{
	describe(SIDE(1, 1.5));
	describe("x");
}

void answer() { call(); }
