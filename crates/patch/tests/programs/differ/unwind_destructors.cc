//#Rule: an exception passes through changed code, whose local objects are destroyed on the way
//#Expect: accept
//#Changed: through
//#Unchanged: fail Guard::~Guard
//#Output-before: -a-b caught
//#Output-after: -a-c-b caught
#include "case.h"

struct Guard {
	const char *name;
	explicit Guard(const char *name) : name(name) {}
	~Guard();
};
KEEP Guard::~Guard() { printf("-%s", name); }

KEEP void fail() { throw 1; }

KEEP void through()
{
	Guard b("b");
#ifdef SP_AFTER
	Guard c("c");
#endif
	Guard a("a");
	fail();
}

void answer()
{
	try {
		through();
	} catch (...) {
		printf(" caught");
	}
}
