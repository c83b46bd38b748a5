//#Rule: two units share the static local of an inline function, before and after
//#Patchable: no
//#Expect: accept
//#Changed: counter
//#Output-before: 1 2 | 3 4
//#Output-after: 14 24 | 34 44
//#Output-reverted: 45 46 | 47 48
#include "case.h"
#include "shared.h"

int there();
void answer()
{
	int here = counter();

	printf("%d %d", here, there());
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

KEEP int there() { return counter(); }
//#Header: shared.h
KEEP inline int counter()
{
	static int calls = 0;

	return calls += SIDE(1, 10);
}
