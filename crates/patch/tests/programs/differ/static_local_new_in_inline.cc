//#Rule: a new static local of an inline function is one variable for the two units that have the function
//#Patchable: no
//#Expect: accept
//#Changed: there
//#Output-before: 0 0 | 0 0
//#Output-after: 1 2 | 3 4
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

KEEP int there()
{
	ROOM;
	return counter();
}
//#Header: shared.h
#ifdef SP_AFTER
KEEP inline int &cell()
{
	static int calls = 0;

	return calls;
}
#endif
__attribute__((always_inline)) inline int counter()
{
#ifdef SP_AFTER
	return ++cell();
#else
	return 0;
#endif
}
