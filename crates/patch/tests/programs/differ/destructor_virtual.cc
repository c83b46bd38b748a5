//#Rule: a virtual destructor changes: the deleting, the complete and the base form
//#Expect: accept
//#Changed: Base::~Base
//#Output-before: derived base 1 base 1
//#Output-after: derived base 2 base 2
#include "case.h"

struct Base {
	virtual ~Base();
};
struct Derived : Base {
	~Derived() override;
};
KEEP Base::~Base() { printf("base %d", SIDE(1, 2)); }
KEEP Derived::~Derived() { printf("derived "); }

static Base *make(int which) { return which ? new Derived : new Base; }

void answer()
{
	delete make(1);
	printf(" ");
	delete make(0);
}
