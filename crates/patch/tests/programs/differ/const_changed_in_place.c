//#Rule: a constant that other units may use changes in place, which a kernel with generations can do
//#Expect: accept
//#In-place: limits
//#Link: pie nopie
//#Changed: here
//#Unchanged: elsewhere
//#Output-before: 10 20
//#Output-after: 11 21
//#Live: refused only --view generation supports
#include "case.h"

const int limits[] = { 10, SIDE(20, 21) };

int elsewhere(void);
KEEP int here(void) { return limits[0] + SIDE(0, 1); }

void answer(void)
{
	int a = here();

	printf("%d %d", a, elsewhere());
}
//#Unit: other.c
#include "case.h"

extern const int limits[];

KEEP int elsewhere(void) { return limits[1]; }
