//#Rule: setjmp and longjmp through a patched function
//#Expect: accept
//#Changed: attempt
//#Output-before: caught 1
//#Output-after: caught 2
#include "case.h"
#include <setjmp.h>

static jmp_buf buffer;

static KEEP void fail(int code) { longjmp(buffer, code); }

KEEP int attempt(void)
{
	int code = setjmp(buffer);

	if (code == 0)
		fail(SIDE(1, 2));
	return code;
}

void answer(void) { printf("caught %d", attempt()); }
