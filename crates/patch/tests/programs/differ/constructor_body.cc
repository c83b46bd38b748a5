//#Rule: a constructor changes: its complete and its base form are one function or two
//#Expect: accept
//#Changed: Base::Base
//#Output-before: 1 1
//#Output-after: 5 5
#include "case.h"

struct Base {
	int value;
	Base();
	virtual ~Base();
};
struct Derived : Base {
	Derived();
};
KEEP Base::Base() : value(SIDE(1, 5)) {}
KEEP Base::~Base() {}
KEEP Derived::Derived() {}

void answer()
{
	Base base;
	Derived derived;

	printf("%d %d", base.value, derived.value);
}
