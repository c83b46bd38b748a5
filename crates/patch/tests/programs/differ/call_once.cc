//#Rule: std::call_once in changed code: what was done once is not done again
//#Expect: accept
//#Libs: -lpthread
//#Changed: next
//#Output-before: once 1 | 2
//#Output-after: now 3 | now 4
//#Output-reverted: 5 | 6
#include "case.h"
#include <mutex>

static std::once_flag flag;
static int value;

static void start()
{
	printf("once ");
	value = 0;
}

KEEP void next()
{
	std::call_once(flag, start);
	printf("%s%d", SIDE("", "now "), ++value);
}

void answer() { next(); }
