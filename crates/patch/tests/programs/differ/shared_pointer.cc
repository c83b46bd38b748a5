//#Rule: reference-counted objects are made by old code and released by new code
//#Expect: accept
//#Changed: use
//#Output-before: 1 5 1 | 1 5 1
//#Output-after: 2 5 1 | 2 5 1
#include "case.h"
#include <memory>

struct Item {
	int n;
	explicit Item(int n) : n(n) {}
};
static std::shared_ptr<Item> kept;

KEEP void use(std::shared_ptr<Item> item)
{
#ifdef SP_AFTER
	std::shared_ptr<Item> other = item;
#endif
	printf("%ld %d", item.use_count() - 1, item->n);
}

void answer()
{
	if (!kept)
		kept = std::make_shared<Item>(5);
	use(kept);
	printf(" %ld", kept.use_count());
}
