//#Rule: a C function of a C++ unit changes, and calls C++ code
//#Expect: accept
//#Changed: entry
//#Unchanged: Engine::run
//#Output-before: 5
//#Output-after: 6
#include "case.h"

struct Engine {
	int n;
	int run() const;
};
KEEP int Engine::run() const { return n; }

extern "C" {
KEEP int entry(int n)
{
	Engine engine = {n + SIDE(0, 1)};

	return engine.run();
}
}

void answer() { printf("%d", entry(5)); }
