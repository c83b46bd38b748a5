//#Rule: an inline function that two units define: the linker kept one copy, and that one is redirected
//#Patchable: no
//#Expect: accept
//#Changed: scale
//#Unchanged: there
//#Output-before: 2 3
//#Output-after: 20 30
#include "case.h"
#include "shared.h"

int there();
void answer()
{
	int here = scale(2);

	printf("%d %d", here, there());
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

KEEP int there() { return scale(3); }
//#Header: shared.h
KEEP inline int scale(int a)
{
	asm volatile("");
	return a * SIDE(1, 10);
}
