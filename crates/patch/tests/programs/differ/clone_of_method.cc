//#Rule: the compiler made a clone of a private method; the clone changes and so do its callers' views of it
//#Expect: accept
//#Opt: -O2 -O3
//#Compiler: gnu
//#Has: _ZN12_GLOBAL__N_14Tool4workE
//#Changed: (anonymousnamespace)::Tool::work
//#Output-before: 7
//#Output-after: 9
#include "case.h"

namespace {
struct Tool {
	int unused;
	int weight;
	__attribute__((noinline)) int work(int n, int mode)
	{
		asm volatile("");
		return mode == 3 ? n * weight + SIDE(1, 3) : 0;
	}
};
}

static Tool tool = {0, 2};

KEEP int first(int n) { return tool.work(n, 3); }

void answer() { printf("%d", first(3)); }
