//#Rule: two virtual functions change places in the table
//#Expect: refuse class-changed
//#Refusal: class `Shape` of virtual_functions_swapped.cc changed its table of virtual functions (entry 2: `Shape::area()` became `Shape::edge()`)
//#Output-before: 3 2
#include "case.h"

struct Shape {
#ifdef SP_AFTER
	virtual int edge();
	virtual int area();
#else
	virtual int area();
	virtual int edge();
#endif
};
KEEP int Shape::area() { return 3 + SIDE(0, 1); }
KEEP int Shape::edge() { return 2; }

static Shape shape;
static Shape *volatile pointer = &shape;

void answer() { printf("%d %d", pointer->area(), pointer->edge()); }
