//#Rule: a constructor of a class with a virtual base changes: it sets tables while it builds
//#Expect: accept
//#Changed: Middle::Middle
//#Output-before: 3 4
//#Output-after: 3 5
#include "case.h"

struct Root {
	int r;
	Root() : r(3) {}
	virtual int value() { return r; }
	virtual ~Root() = default;
};
struct Middle : virtual Root {
	int m;
	Middle();
	int value() override { return m; }
};
struct Leaf : Middle {
	Leaf() {}
};
KEEP Middle::Middle() : m(SIDE(4, 5)) {}

void answer()
{
	Leaf *leaf = new Leaf;
	Root *root = leaf;

	printf("%d %d", leaf->r, root->value());
	delete root;
}
