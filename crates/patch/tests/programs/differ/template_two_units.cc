//#Rule: a function template changes that two units instantiate for the same types and for others
//#Patchable: no
//#Expect: accept
//#Changed: twice<int> twice<long>
//#Output-before: 4 6 8
//#Output-after: 5 7 9
#include "case.h"
#include "shared.h"

long there();
void answer()
{
	int here = twice(2);

	printf("%d %ld %ld", here, there(), twice(4L));
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

KEEP long there() { return twice(3); }
//#Header: shared.h
template <class T> KEEP T twice(T a)
{
	asm volatile("");
	return a * 2 + SIDE(0, 1);
}
