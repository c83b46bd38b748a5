//#Rule: a class gains a virtual function: objects that live have the table without it
//#Expect: refuse class-changed
//#Refusal: class `Shape` of virtual_function_added.cc changed its table of virtual functions (from 4 to 5 entries)
//#Output-before: 3
#include "case.h"

struct Shape {
	virtual int area();
	virtual int edge();
#ifdef SP_AFTER
	virtual int corners();
#endif
};
KEEP int Shape::area() { return 3 + SIDE(0, 1); }
KEEP int Shape::edge() { return 2; }
#ifdef SP_AFTER
KEEP int Shape::corners() { return 4; }
#endif

static Shape shape;
static Shape *volatile pointer = &shape;

void answer() { printf("%d", pointer->area()); }
