//#Rule: a loop back to the entry itself goes through the jump
//#Expect: accept
//#Link: pie
//#Opt: -O2
//#Flags: -fcf-protection=none -fpatchable-function-entry=0
//#Changed: spin
//#Output-before: 5
//#Output-after: 10
#include "case.h"

#ifdef SP_AFTER
__attribute__((naked, noipa)) int spin(int n, int sum)
{
	__asm__("1:\taddl $2, %esi\n\tdecl %edi\n\tjnz 1b\n\tmovl %esi, %eax\n\tret");
}
#else
__attribute__((naked, noipa)) int spin(int n, int sum)
{
	__asm__("1:\taddl $1, %esi\n\tdecl %edi\n\tjnz 1b\n\tmovl %esi, %eax\n\tret");
}
#endif

void answer(void) { printf("%d", spin(5, 0)); }
