//#Rule: a class gains a base
//#Expect: refuse type-layout-changed
//#Refusal: Item` changed
//#Output-before: 3
#include "case.h"

struct Extra {
	int e = 1;
};
#ifdef SP_AFTER
struct Item : Extra {
#else
struct Item {
#endif
	int n = 3;
	int get() const;
};
KEEP int Item::get() const { return n + SIDE(0, 1); }

static Item item;

void answer() { printf("%d", item.get()); }
