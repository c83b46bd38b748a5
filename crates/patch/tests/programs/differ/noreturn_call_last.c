//#Rule: a trailing call that does not return: its return address is the function's end
//#Expect: accept
//#Changed: leave
//#Output-before: left 1
//#Output-after: left 2
#include "case.h"
#include <setjmp.h>

static jmp_buf buffer;

static KEEP __attribute__((noreturn)) void out(int code) { longjmp(buffer, code); }
KEEP __attribute__((noreturn)) void leave(int n) { out(n + SIDE(0, 1)); }

void answer(void)
{
	int code = setjmp(buffer);

	if (code == 0)
		leave(1);
	printf("left %d", code);
}
