//#Rule: a function of a virtual base changes: calls come by a thunk that looks the offset up
//#Expect: accept
//#Changed: Leaf::value
//#Output-before: 15 15
//#Output-after: 16 16
#include "case.h"

struct Root {
	int r = 5;
	virtual int value();
	virtual ~Root() = default;
};
struct Middle : virtual Root {
	int m = 7;
};
struct Leaf : Middle {
	int l = 10;
	int value() override;
};
KEEP int Root::value() { return r; }
KEEP int Leaf::value() { return l + r + SIDE(0, 1); }

static Leaf leaf;
static Root *volatile root = &leaf;
static Leaf *volatile itself = &leaf;

void answer() { printf("%d %d", root->value(), itself->value()); }
