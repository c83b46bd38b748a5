//#Rule: a callee that clobbers more registers than before changes the callers that relied on it (IPA register allocation)
//#Expect: accept
//#Opt: -O2 -O3
//#Changed: callee
//#Output-before: 15 0
//#Output-after: 15 7
#include "case.h"

volatile int out;

static __attribute__((noinline)) void callee(void)
{
#ifdef SP_AFTER
	__asm__ volatile("movl $7, %%ecx\n\tmovl %%ecx, %0\n\txorl %%esi, %%esi\n\txorl %%edi, %%edi\n\txorl %%edx, %%edx\n\t"
			 "xorl %%r8d, %%r8d\n\txorl %%r9d, %%r9d\n\txorl %%r10d, %%r10d"
			 : "=m"(out) : : "ecx", "esi", "edi", "edx", "r8", "r9", "r10");
#line 23
#else
	__asm__ volatile("movl $0, %0" : "=m"(out));
#line 23
#endif
}

KEEP int caller(int a, int b, int c, int d, int e)
{
	callee();
	return a + b + c + d + e;
}

void answer(void)
{
	int sum = caller(1, 2, 3, 4, 5);

	printf("%d %d", sum, out);
}
