//#Rule: a callback stored before the patch runs the new code
//#Expect: accept
//#Changed: compare
//#Output-before: 1 2 3 | 1 2 3
//#Output-after: 3 2 1
#include "case.h"

static int (*order)(const void *, const void *);

static KEEP int compare(const void *a, const void *b)
{
	return SIDE(1, -1) * (*(const int *)a - *(const int *)b);
}

void answer(void)
{
	int numbers[] = { 2, 3, 1 };

	if (!order)
		order = compare;
	qsort(numbers, 3, sizeof *numbers, order);
	printf("%d %d %d", numbers[0], numbers[1], numbers[2]);
}
