//#Rule: changed constant data that other units see is refused
//#Expect: refuse data-changed
//#Refusal: `limits`
//#Output-before: 10 20
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
