//#Rule: a lambda that is stored captures more: the closures that live keep the old code
//#Expect: accept
//#Changed: work
//#Output-before: 11
//#Output-after: 1116 | 1616
//#Warning: keep the old code
//#Output-reverted: 16
#include "case.h"
#include <functional>

static std::function<int(int)> stored;

KEEP int work(int n, int more)
{
	(void)more;
#ifdef SP_AFTER
	int old = stored ? stored(1) : 0;

	stored = [n, more](int m) { return n + m + more; };
	return old * 100 + stored(1);
#else
	if (!stored)
		stored = [n](int m) { return n + m; };
	return stored(1);
#endif
}

void answer() { printf("%d", work(10, 5)); }
