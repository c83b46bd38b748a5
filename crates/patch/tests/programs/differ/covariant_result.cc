//#Rule: a function with a covariant result changes: a thunk adjusts what it returns
//#Expect: accept
//#Changed: Copy::clone
//#Output-before: 8
//#Output-after: 9
#include "case.h"

struct Tag {
	int tag = 1;
	virtual ~Tag() = default;
};
struct Item {
	int n = 0;
	virtual Item *clone() const;
	virtual ~Item() = default;
};
struct Copy : Tag, Item {
	Copy *clone() const override;
};
KEEP Item *Item::clone() const { return new Item; }
KEEP Copy *Copy::clone() const
{
	Copy *copy = new Copy;

	copy->n = n + SIDE(1, 2);
	return copy;
}

void answer()
{
	Copy first;
	const Item *volatile item = &first;

	first.n = 7;
	Item *copy = item->clone();
	printf("%d", copy->n);
	delete copy;
}
