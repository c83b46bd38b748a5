//#Rule: a unit that makes static objects is to make one more
//#Expect: refuse static-initialiser
//#Refusal: the initialisation of static objects of second_static_object.cc changed
//#Output-before: 5 0
#include "case.h"

KEEP int half(int n)
{
	asm volatile("" : "+r"(n));
	return n / 2;
}
static int number = half(10);
#ifdef SP_AFTER
static int other = half(20);
#endif

void answer() { printf("%d %d", number, SIDE(0, other)); }
