//#Rule: two units have different code for one inline function, and the linker kept the first's
//#Patchable: no
//#Expect: accept
//#Changed: scale
//#Unchanged: there
//#Output-before: 4 6
//#Output-after: 40 60
#include "case.h"
#include "shared.h"

int there();
void answer()
{
	int here = scale(2);

	printf("%d %d", here, there());
}
//#Unit: other.cc
#define OTHER asm volatile("nopl 0x12345678(%rax)")
#include "case.h"
#include "shared.h"

KEEP int there() { return scale(3); }
//#Header: shared.h
#ifndef OTHER
#define OTHER asm volatile("")
#endif
KEEP inline int scale(int a)
{
	OTHER;
	return a * SIDE(2, 20);
}
