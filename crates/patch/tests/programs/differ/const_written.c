//#Rule: a constant that other units may use is written where it is, with the author's permission
//#Expect: accept
//#Data: limits labels
//#Link: pie nopie
//#Changed: here
//#Unchanged: elsewhere
//#Output-before: 10 20 a b
//#Output-after: 11 21 a c
#include "case.h"

const int limits[] = { 10, SIDE(20, 21) };
const char *const labels[] = { "a", SIDE("b", "c") };

int elsewhere(void);
const char *label(int i);
KEEP int here(void) { return limits[0] + SIDE(0, 1); }

void answer(void)
{
	int a = here();

	printf("%d %d %s %s", a, elsewhere(), label(0), label(1));
}
//#Unit: other.c
#include "case.h"

extern const int limits[];
extern const char *const labels[];

KEEP int elsewhere(void) { return limits[1]; }
KEEP const char *label(int i) { return labels[i]; }
