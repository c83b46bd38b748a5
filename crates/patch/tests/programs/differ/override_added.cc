//#Rule: a derived class overrides a function that it inherited: its table changes
//#Expect: refuse class-changed
//#Refusal: class `Derived` of override_added.cc
//#Output-before: 1
#include "case.h"

struct Base {
	virtual int value();
};
struct Derived : Base {
#ifdef SP_AFTER
	int value() override;
#endif
	virtual int other();
};
KEEP int Base::value() { return 1; }
KEEP int Derived::other() { return 5; }
#ifdef SP_AFTER
KEEP int Derived::value() { return 2; }
#endif

static Derived derived;
static Base *volatile base = &derived;

void answer() { printf("%d", base->value()); }
