//#Rule: functions and variables of an anonymous namespace, one name in two units
//#Expect: accept
//#Changed: (anonymousnamespace)::step
//#Unchanged: there
//#Output-before: 1 100 | 2 200
//#Output-after: 12 300 | 22 400
//#Output-reverted: 23 500 | 24 600
#include "case.h"

namespace {
int count;
KEEP int step() { return count += SIDE(1, 10); }
}

int there();
void answer()
{
	int here = step();

	printf("%d %d", here, there());
}
//#Unit: other.cc
#include "case.h"

namespace {
int count;
KEEP int step() { return count += 100; }
}

KEEP int there() { return step(); }
