//#Rule: code reads half of a constant that the linker merges with equal ones
//#Expect: accept
//#Changed: high
//#Unchanged: also_high
//#Output-before: 17 17
//#Output-after: 18 17
#include "case.h"

#define UPPER_HALF(n)                                                       \
	asm volatile(".pushsection .rodata.cst8,\"aM\",@progbits,8\n"       \
		     "1:\t.long 5, 17\n"                                    \
		     "\t.popsection\n"                                      \
		     "\tmovl 1b+4(%%rip), %0"                               \
		     : "=r"(n))

KEEP int high()
{
	int n;

	UPPER_HALF(n);
	return n + SIDE(0, 1);
}
KEEP int also_high()
{
	int n;

	UPPER_HALF(n);
	return n;
}

void answer()
{
	int n = high();

	printf("%d %d", n, also_high());
}
