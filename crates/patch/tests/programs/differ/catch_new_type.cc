//#Rule: changed code catches a type that no code of the program named before
//#Expect: accept
//#Changed: guarded
//#Output-before: other
//#Output-after: double 2.5
#include "case.h"

KEEP void fail(int n)
{
	if (n)
		throw 2.5;
}

KEEP void guarded(int n)
{
	try {
		fail(n);
#ifdef SP_AFTER
	} catch (double value) {
		printf("double %.1f", value);
#endif
	} catch (...) {
		printf("other");
	}
}

void answer() { guarded(1); }
