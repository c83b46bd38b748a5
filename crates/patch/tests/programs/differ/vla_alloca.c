//#Rule: variable arrays and alloca: frames of run-time size
//#Expect: accept
//#Changed: total
//#Output-before: 10
//#Output-after: 20
#include "case.h"
#include <alloca.h>

KEEP int total(int n)
{
	int list[n], *more = alloca((size_t)n * sizeof *more), sum = 0;

	for (int i = 0; i < n; i++) {
		list[i] = i;
		more[i] = i * SIDE(0, 1);
	}
	for (int i = 0; i < n; i++)
		sum += list[i] + more[i];
	return sum;
}

void answer(void) { printf("%d", total(5)); }
