//#Rule: a function of a second base changes: calls through that base come by a thunk
//#Expect: accept
//#Changed: Both::second
//#Output-before: 12 12
//#Output-after: 13 13
#include "case.h"

struct First {
	int a = 1;
	virtual int first() { return a; }
};
struct Second {
	int b = 2;
	virtual int second() { return b; }
};
struct Both : First, Second {
	int c = 10;
	int second() override;
};
KEEP int Both::second() { return c + b + SIDE(0, 1); }

static Both both;
static Second *volatile as_second = &both;
static Both *volatile as_both = &both;

void answer() { printf("%d %d", as_second->second(), as_both->second()); }
