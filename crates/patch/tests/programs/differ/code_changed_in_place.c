//#Rule: a function of other units too that is shorter than a jump changes in place, which a kernel with generations can do
//#Expect: accept
//#In-place: tiny
//#Opt: -O2 -Os
//#Flags: -falign-functions=1 -fcf-protection=none -fpatchable-function-entry=0
//#Link: pie nopie
//#Unchanged: elsewhere
//#Output-before: 1 3
//#Output-after: 2 4
//#Live: refused only --view generation supports
#include "case.h"

KEEP int tiny(int a, int b) { return SIDE(a, b); }
KEEP void tiny_next(void) { }

int elsewhere(int a, int b);

void answer(void)
{
	tiny_next();
	printf("%d %d", tiny(1, 2), elsewhere(3, 4));
}
//#Unit: other.c
#include "case.h"

int tiny(int a, int b);
KEEP int elsewhere(int a, int b) { return tiny(a, b); }
