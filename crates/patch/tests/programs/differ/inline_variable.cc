//#Rule: two units share an inline variable; changed code of both reads and writes it
//#Patchable: no
//#Expect: accept
//#Flags: -std=c++17
//#Changed: here there
//#Output-before: 1 3 | 4 6
//#Output-after: 17 39 | 50 72
//#Output-reverted: 73 75 | 76 78
#include "case.h"
#include "shared.h"

KEEP int here() { return total += SIDE(1, 11); }

int there();
void answer()
{
	int first = here();

	printf("%d %d", first, there());
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

KEEP int there() { return total += SIDE(2, 22); }
//#Header: shared.h
inline int total = 0;
