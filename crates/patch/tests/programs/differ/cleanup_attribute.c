//#Rule: cleanups with -fexceptions: .gcc_except_table of the new code
//#Expect: accept
//#Flags: -fexceptions
//#Changed: guarded
//#Output-before: in out
//#Output-after: inside out
//#Has: .gcc_except_table
#include "case.h"

static void leave(int *p) { printf(*p ? " out" : " never"); }

KEEP void say(const char *text) { printf("%s", text); }
KEEP void guarded(void)
{
	int token __attribute__((cleanup(leave))) = 1;

	say(SIDE("in", "inside"));
}

void answer(void) { guarded(); }
