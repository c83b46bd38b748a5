//#Rule: a loop back into bytes 1 to 4 of the entry: the callers are patched instead
//#Expect: accept
//#Link: pie
//#Opt: -O2
//#Flags: -fcf-protection=none -fpatchable-function-entry=0
//#Changed: caller
//#Output-before: 5
//#Output-after: 10
#include "case.h"

static __attribute__((naked, noipa)) int spin(int n)
{
#ifdef SP_AFTER
	__asm__("xorl %eax, %eax\n1:\taddl $2, %eax\n\tdecl %edi\n\tjnz 1b\n\tret");
#else
	__asm__("xorl %eax, %eax\n1:\tincl %eax\n\tdecl %edi\n\tjnz 1b\n\tret");
#endif
}

KEEP int caller(void) { return spin(5); }

void answer(void) { printf("%d", caller()); }
