//#Rule: a class of an anonymous namespace with virtual functions, one of which changes
//#Expect: accept
//#Changed: (anonymousnamespace)::Local::value
//#Output-before: 4
//#Output-after: 5
#include "case.h"

struct Base {
	virtual ~Base() = default;
	virtual int value() const = 0;
};
namespace {
struct Local : Base {
	int n = 4;
	KEEP int value() const override { return n + SIDE(0, 1); }
};
}

static Base *base;

void answer()
{
	if (!base)
		base = new Local;
	printf("%d", base->value());
}
