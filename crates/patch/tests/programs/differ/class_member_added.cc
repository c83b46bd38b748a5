//#Rule: a private member is added to a class of a namespace
//#Expect: refuse type-layout-changed
//#Refusal: type `class store::Cache` changed: member `misses` added at offset 0x4
//#Output-before: 1
#include "case.h"

namespace store {
class Cache {
public:
	int hit();

private:
	int hits = 0;
#ifdef SP_AFTER
	int misses = 0;
#endif
};
}
KEEP int store::Cache::hit() { return ++hits + SIDE(0, 1); }

void answer()
{
	store::Cache cache;

	printf("%d", cache.hit());
}
