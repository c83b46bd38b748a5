//#Rule: a table of labels of a computed goto belongs to its function
//#Expect: accept
//#Changed: interpret
//#Output-before: 13
//#Output-after: 19
//#Has: .data.rel.ro
#include "case.h"

KEEP int interpret(const unsigned char *code)
{
	static const void *const labels[] = { &&stop, &&increment, &&triple };
	int value = 1;

	goto *labels[*code++];
increment:
	value += SIDE(1, 2);
	goto *labels[*code++];
triple:
	value *= 3;
	goto *labels[*code++];
stop:
	return value;
}

void answer(void)
{
	static const unsigned char code[] = { 1, 2, 2 - 1, 2 - 1, 2 - 1, 2 - 1, 2 - 1, 2 - 1, 2 - 1, 0 };

	printf("%d", interpret(code) SIDE(, - 4));
}
