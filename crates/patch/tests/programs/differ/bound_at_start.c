//#Rule: a target that is bound at start (-z now): its PLT may be .plt.sec or .plt.got
//#Expect: accept
//#Libs: -Wl,-z,now
//#Changed: length
//#Output-before: 3
//#Output-after: 6
#include "case.h"

KEEP size_t length(const char *text)
{
	char copy[16];

	snprintf(copy, sizeof copy, SIDE("%s", "%s%s"), text, text);
	return strlen(copy);
}

void answer(void) { printf("%zu", length("abc")); }
