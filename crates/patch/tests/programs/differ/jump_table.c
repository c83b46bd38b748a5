//#Rule: a switch by jump table, one case of it changed
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: dispatch
//#Unchanged: one two
//#Output-before: 1 2 30 40 52 6 -1
//#Output-after: 1 2 30 44 52 6 -1
//#Has: .rela.rodata
#include "case.h"

volatile int zero;
KEEP int one(int a) { return a; }
KEEP int two(int a) { return a * 2; }

KEEP int dispatch(int which, int a)
{
	switch (which) {
	case 0: return one(a);
	case 1: return two(a);
	case 2: return one(a) + 29 - zero;
	case 3: return two(a) * SIDE(20, 22) - zero;
	case 4: return one(a + 3) * 13 + zero;
	case 5: return two(a) * 3;
	default: return -1;
	}
}

void answer(void)
{
	printf("%d %d %d %d %d %d %d", dispatch(0, 1), dispatch(1, 1), dispatch(2, 1), dispatch(3, 1), dispatch(4, 1),
	       dispatch(5, 1), dispatch(6, 1));
}
