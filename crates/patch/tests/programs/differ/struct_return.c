//#Rule: a large structure returned through a hidden pointer
//#Expect: accept
//#Changed: make
//#Output-before: 0 7 14
//#Output-after: 0 8 16
#include "case.h"

struct big { long cells[20]; };

KEEP struct big make(int step)
{
	struct big b;

	for (int i = 0; i < 20; i++)
		b.cells[i] = (long)i * (step + SIDE(0, 1));
	return b;
}

void answer(void)
{
	struct big b = make(7);

	printf("%ld %ld %ld", b.cells[0], b.cells[1], b.cells[2]);
}
