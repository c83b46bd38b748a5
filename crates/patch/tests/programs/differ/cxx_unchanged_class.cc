//#Rule: a class gets a method that nobody calls and no object of it is other than before
//#Expect: nothing
//#Output-before: 3
#include "case.h"

struct Item {
	int n;
	int get() const;
#ifdef SP_AFTER
	int unused() const { return n * 2; }
#endif
};
KEEP int Item::get() const { return n; }

void answer() { printf("%d", Item{3}.get()); }
