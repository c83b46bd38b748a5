//#Rule: a new import with several versions in libc takes the default one
//#Expect: accept
//#Libs: -lpthread
//#Changed: copy
//#Output-before: abcdef
//#Output-after: ababcd
#include "case.h"

KEEP void copy(char *to, const char *from, size_t n) 
{
	ROOM;
	SIDE(memmove(to, from, 0 * n), memcpy(to, from, n));
}

void answer(void)
{
	char text[] = "abcdef";
	char source[] = "abcd";

	copy(text + 2, source, 4);
	printf("%s", text);
}
