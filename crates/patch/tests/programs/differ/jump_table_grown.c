//#Rule: a switch by jump table that gains cases
//#Expect: accept
//#Changed: dispatch
//#Output-before: 1 3 4 6 6 -1 -1
//#Output-after: 1 3 4 6 6 7 9
//#Has: .rela.rodata
#include "case.h"

volatile int zero;
KEEP int one(int a) { return a + zero; }

KEEP int dispatch(int which, int a)
{
	switch (which) {
	case 0: return one(a);
	case 1: return one(a * 2) + 1;
	case 2: return one(a + 3);
	case 3: return one(a) * 6;
	case 4: return one(a + 1) * 3;
#ifdef SP_AFTER
	case 5: return one(a) + 6;
	case 6: return one(a + 2) * 3;
#endif
	default: return -1;
	}
}

void answer(void)
{
	for (int i = 0; i < 7; i++)
		printf(i ? " %d" : "%d", dispatch(i, 1));
}
