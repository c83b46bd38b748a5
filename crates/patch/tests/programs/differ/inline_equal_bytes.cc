//#Rule: inline functions and virtual functions of equal bytes are told apart by who leads to them
//#Patchable: no
//#Expect: accept
//#Changed: second Item::value
//#Unchanged: first third Item::other
//#Output-before: 2 2 2 2 2
//#Output-after: 2 9 2 9 2
#include "case.h"
#include "shared.h"

int there();
static Item *volatile item;
void answer()
{
	if (!item)
		item = new Item;
	int a = first(1), b = second(1), c = there();

	printf("%d %d %d", a, b, c);
	printf(" %d %d", item->value(1), item->other(1));
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

KEEP int there() { return third(1) + first(1) - 2; }
//#Header: shared.h
#define SAME(name, result)                  \
	KEEP inline int name(int a)         \
	{                                   \
		asm volatile("" : "+r"(a)); \
		return a + (result);        \
	}
SAME(first, 1)
SAME(second, SIDE(1, 8))
SAME(third, 1)
struct Item {
	virtual int value(int a)
	{
		asm volatile("" : "+r"(a));
		return a + SIDE(1, 8);
	}
	virtual int other(int a)
	{
		asm volatile("" : "+r"(a));
		return a + 1;
	}
};
