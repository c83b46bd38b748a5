//#Rule: two changed functions of two units in one patch
//#Expect: accept
//#Changed: encode decode
//#Output-before: 41
//#Output-after: 41 (new)
#include "case.h"

int decode(int a, const char **note);
KEEP int encode(int a) { return a SIDE(+, ^) 77; }

void answer(void)
{
	const char *note = "";
	int value = decode(encode(41), &note);

	printf("%d%s", value, note);
}
//#Unit: other.c
#include "case.h"

KEEP int decode(int a, const char **note)
{
	*note = SIDE("", " (new)");
	return a SIDE(-, ^) 77;
}
