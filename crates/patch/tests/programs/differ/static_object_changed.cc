//#Rule: a static object is made another way: it has been made already
//#Expect: refuse static-initialiser
//#Refusal: the initialisation of static objects of static_object_changed.cc changed
//#Output-before: 5
#include "case.h"

KEEP int half(int n)
{
	asm volatile("" : "+r"(n));
	return n / 2;
}
static int number = half(SIDE(10, 20));

void answer() { printf("%d", number); }
