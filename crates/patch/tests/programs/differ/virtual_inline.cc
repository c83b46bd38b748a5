//#Rule: a virtual function of a header class changes: only the table of virtual functions tells where its code is
//#Patchable: no
//#Expect: accept
//#Changed: Item::value
//#Unchanged: Item::other there
//#Output-before: 5 6
//#Output-after: 8 9
#include "case.h"
#include "shared.h"

Item *there();
static Item *mine;
void answer()
{
	if (!mine)
		mine = new Item;
	Item *theirs = there();
	printf("%d %d", mine->value(), theirs->value() + 1);
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

static Item *made;
KEEP Item *there()
{
	if (!made)
		made = new Item;
	return made;
}
//#Header: shared.h
struct Base {
	virtual int value() = 0;
	virtual int other() = 0;
	virtual ~Base() {}
};
struct Item : Base {
	int n = 5;
	int value() override
	{
		asm volatile("");
		return n + SIDE(0, 3);
	}
	int other() override
	{
		asm volatile("");
		return n + 1;
	}
};
