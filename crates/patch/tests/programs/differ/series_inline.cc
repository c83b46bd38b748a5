//#Rule: a second patch of a series changes what the first brought: a new inline function of two units
//#Patchable: no
//#Expect: accept
//#Changed: there
//#Output-before: 1 2
//#Output-base: 11 12
//#Output-after: 21 22
#include "case.h"
#include "shared.h"

int there();
KEEP int here() { return bump(1); }
void answer()
{
	int first = here();

	printf("%d %d", first, there());
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

KEEP int there() { return bump(2); }
//#Header: shared.h
#ifdef SP_BASE
KEEP inline int extra(int n)
{
	asm volatile("");
	return n + SIDE(10, 20);
}
#endif
__attribute__((always_inline)) inline int bump(int n)
{
#ifdef SP_BASE
	return extra(n);
#else
	return n;
#endif
}
