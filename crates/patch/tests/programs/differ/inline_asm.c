//#Rule: inline assembly with a symbol operand
//#Expect: accept
//#Changed: bump
//#Output-before: 6 | 7
//#Output-after: 10 | 13
//#Output-reverted: 14
#include "case.h"

static int counter = 5;

KEEP int bump(void)
{
	__asm__ volatile("addl %1, %0" : "+m"(counter) : "i"(SIDE(1, 3)) : "cc");
	return counter;
}

void answer(void) { printf("%d", bump()); }
