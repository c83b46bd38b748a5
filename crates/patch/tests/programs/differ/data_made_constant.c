//#Rule: data that becomes constant is read where it is
//#Expect: accept
//#Changed: letter
//#Output-before: a
//#Output-after: b
//#Output-reverted: a
#include "case.h"

static SIDE(, const) char letters[] = "abcdefghijklmnopqrstuvwxyz";

KEEP int letter(int at) { return letters[at + SIDE(0, 1)]; }

void answer(void)
{
	/* gcc makes data constant that it can see is never written */
	static void *volatile held;

	held = (void *)letters;
	if (held)
		printf("%c", letter(0));
}
