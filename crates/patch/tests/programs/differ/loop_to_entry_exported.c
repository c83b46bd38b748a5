//#Rule: a loop back into bytes 1 to 4 of the entry of a function that is called by pointer is refused
//#Expect: refuse branch-into-entry
//#Link: pie
//#Opt: -O2
//#Flags: -fcf-protection=none -fpatchable-function-entry=0
//#Refusal: entry of `spin`
//#Output-before: 5
#include "case.h"

__attribute__((naked, noipa)) int spin(int n)
{
#ifdef SP_AFTER
	__asm__("xorl %eax, %eax\n1:\taddl $2, %eax\n\tdecl %edi\n\tjnz 1b\n\tret");
#else
	__asm__("xorl %eax, %eax\n1:\tincl %eax\n\tdecl %edi\n\tjnz 1b\n\tret");
#endif
}

int (*volatile pointer)(int) = spin;

void answer(void) { printf("%d", pointer(5)); }
