//#Rule: a class without virtual functions gets one: every object would have to grow
//#Expect: refuse type-layout-changed
//#Refusal: Plain` changed
//#Output-before: 3
#include "case.h"

struct Plain {
	int n = 3;
#ifdef SP_AFTER
	virtual
#endif
	int get() const;
};
KEEP int Plain::get() const { return n + SIDE(0, 1); }

static Plain plain;

void answer() { printf("%d", plain.get()); }
