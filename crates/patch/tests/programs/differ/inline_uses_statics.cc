//#Rule: inline code uses a static object of the header: each unit has its own, and the copy that the linker kept the first's
//#Patchable: no
//#Expect: accept
//#Changed: there
//#Unchanged: scaled
//#Output-before: 6 8
//#Output-after: 6 9
#include "case.h"
#include "shared.h"

int there();
void answer()
{
	int here = scaled(3);

	printf("%d %d", here, there());
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

static int calls;

KEEP int there()
{
	calls++;
	return scaled(4) + SIDE(0, 1);
}
//#Header: shared.h
struct Factor {
	int n;
	Factor(int n) : n(n) { asm volatile("" : "+r"(this->n)); }
};
static const Factor factor(2);

KEEP inline int scaled(int a)
{
	asm volatile("");
	return a * factor.n;
}
