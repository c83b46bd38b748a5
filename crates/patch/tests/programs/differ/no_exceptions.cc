//#Rule: a unit without exceptions and type information
//#Expect: accept
//#Flags: -fno-exceptions -fno-rtti
//#Changed: Plain::value
//#Output-before: 3
//#Output-after: 4
#include "case.h"

struct Plain {
	virtual int value() const;
};
KEEP int Plain::value() const { return SIDE(3, 4); }

static Plain plain;
static const Plain *volatile pointer = &plain;

void answer() { printf("%d", pointer->value()); }
