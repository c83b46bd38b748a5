//#Rule: changed code catches what unchanged code throws: the exception table of the new code is used
//#Expect: accept
//#Changed: guarded
//#Unchanged: fail
//#Has: .gcc_except_table
//#Output-before: caught 3 of int
//#Output-after: Caught 3 of int, and more
#include "case.h"

KEEP void fail(int n)
{
	if (n)
		throw n;
}

KEEP void guarded(int n)
{
	try {
		fail(n);
		printf("nothing");
	} catch (const char *text) {
		printf("text %s", text);
	} catch (int code) {
		printf(SIDE("caught %d of int", "Caught %d of int, and more"), code);
	}
}

void answer() { guarded(3); }
