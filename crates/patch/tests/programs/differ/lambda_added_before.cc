//#Rule: a new lambda takes the number of an older one that is stored: they are told apart by what they do
//#Expect: accept
//#Changed: work
//#Unchanged: stored
//#Output-before: 3 | 4
//#Output-after: 105 | 106
//#Output-reverted: 7 | 8
#include "case.h"
#include <functional>

static std::function<int(int)> stored;
static int calls;

KEEP int work()
{
#ifdef SP_AFTER
	auto first = [](int n) { return n + 100; };
#else
	auto first = [](int n) { return n; };
#endif
	(void)first;
	if (!stored) {
		int start = 2;
		stored = [start](int n) { return start + n; };
	}
	return SIDE(stored(++calls), first(stored(++calls)));
}

void answer() { printf("%d", work()); }
