//#Rule: initialised data is changed also when only what it points to has another text
//#Expect: refuse data-changed
//#Refusal: `names`
//#Output-before: b
#include "case.h"

static const char *names[] = { "a", SIDE("b", "c") };

KEEP const char *get(int i) { return names[i]; }
KEEP void set(int i, const char *name) { names[i] = name; }

void answer(void)
{
	printf("%s", get(1));
	set(0, get(1));
}
