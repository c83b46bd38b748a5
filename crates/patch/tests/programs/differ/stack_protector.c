//#Rule: a guarded frame: the guard is a word of the thread
//#Expect: accept
//#Flags: -fstack-protector-all
//#Changed: copy
//#Output-before: abc
//#Output-after: ab
#include "case.h"

KEEP void copy(const char *text)
{
	char buffer[64];

	strncpy(buffer, text, sizeof buffer - 1);
	buffer[SIDE(3, 2)] = 0;
	printf("%s", buffer);
}

void answer(void) { copy("abc"); }
