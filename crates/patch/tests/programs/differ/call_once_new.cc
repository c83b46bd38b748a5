//#Rule: changed code calls std::call_once for the first time: the library's thread-locals are reached through it
//#Expect: accept
//#Libs: -lpthread
//#Changed: next
//#Warning: the patch has no scope
//#Opt: -O2 -O3
//#Link: pie
//#Output-before: 0 | 0
//#Output-after: once 1 | 2
#include "case.h"
#include <mutex>

KEEP void other(int n)
{
	if (n)
		throw n;
}

#ifdef SP_AFTER
static std::once_flag flag;
static int value;

static void start()
{
	printf("once ");
	value = 0;
}
#endif

KEEP void next()
{
#ifdef SP_AFTER
	std::call_once(flag, start);
	printf("%d", ++value);
#else
	printf("0");
#endif
}

void answer()
{
	other(0);
	next();
}
