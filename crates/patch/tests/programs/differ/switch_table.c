//#Rule: a switch turned into a table of values (CSWTCH), one value changed
//#Expect: accept
//#Changed: pick
//#Unchanged: other
//#Output-before: 3 1 4 1 5 9 2 -1 / 27
//#Output-after: 3 1 4 1 5 8 2 -1 / 27
//#Has: CSWTCH
#include "case.h"

KEEP int other(int i)
{
	switch (i) {
	case 0: return 27;
	case 1: return 18;
	case 2: return 28;
	case 3: return 81;
	case 4: return 82;
	case 5: return 84;
	}
	return 0;
}

KEEP int pick(int i)
{
	switch (i) {
	case 0: return 3;
	case 1: return 1;
	case 2: return 4;
	case 3: return 1;
	case 4: return 5;
	case 5: return SIDE(9, 8);
	case 6: return 2;
	}
	return -1;
}

void answer(void)
{
	for (int i = 0; i < 8; i++)
		printf("%d ", pick(i));
	printf("/ %d", other(0));
}
