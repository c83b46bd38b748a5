//#Rule: a lambda that live data holds keeps its meaning when the patch adds another one before it
//#Expect: accept
//#Changed: work
//#Output-before: 11
//#Output-after: 1011
#include "case.h"
#include <functional>

static std::function<int(int)> stored;

KEEP int work(int n)
{
	int extra = 0;
#ifdef SP_AFTER
	std::function<int(int)> other = [](int m) { return m + 999; };
	extra = other(1);
#endif
	if (!stored)
		stored = [n](int m) { return n + m; };
	return stored(1) + extra;
}

void answer() { printf("%d", work(10)); }
