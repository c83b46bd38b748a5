//#Rule: half of a merged constant goes by a name of its own
//#Expect: accept
//#Changed: half
//#Output-before: 5 17
//#Output-after: 5 18
#include "case.h"

int half(void);

KEEP int first(void)
{
	int n;

	asm volatile(".pushsection .rodata.cst8,\"aM\",@progbits,8\n"
		     ".Lfirst%=:\t.long 5, 17\n\t.long 6, 18\n"
		     "\t.popsection\n"
		     "\tmovl .Lfirst%=(%%rip), %0"
		     : "=r"(n));
	return n;
}

void answer(void) { printf("%d %d", first(), half()); }
//#Unit: other.c
#include "case.h"

KEEP int half(void)
{
	int n;

	asm volatile(".pushsection .rodata.cst8,\"aM\",@progbits,8\n"
		     ".Lwhole%=:\t.long 5, 17\n\t.long 7, 19\n"
		     "\t.set .Lhalf%=, .Lwhole%=+4\n"
		     "\t.popsection\n"
		     "\tmovl .Lhalf%=(%%rip), %0"
		     : "=r"(n));
	return n + SIDE(0, 1);
}
