//#Rule: everything is hidden: a library has no names for what changes
//#Expect: accept
//#Flags: -fvisibility=hidden -fvisibility-inlines-hidden
//#Changed: Tool::work
//#Output-before: 6
//#Output-after: 7
#pragma GCC visibility push(default)
#include "case.h"
#pragma GCC visibility pop

struct __attribute__((visibility("hidden"))) Tool {
	virtual ~Tool() = default;
	virtual int work(int n);
};
KEEP int Tool::work(int n) { return n * 2 + SIDE(0, 1); }

static Tool *tool;

void answer()
{
	if (!tool)
		tool = new Tool;
	printf("%d", tool->work(3));
}
