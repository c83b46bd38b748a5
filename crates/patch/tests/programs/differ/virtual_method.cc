//#Rule: a virtual function changes: its slot in the table keeps the old entry, which leads to the new code
//#Expect: accept
//#Changed: Square::area
//#Unchanged: Circle::area Square::name
//#Output-before: square 9 circle 12
//#Output-after: square 90 circle 12
#include "case.h"

struct Shape {
	virtual ~Shape() = default;
	virtual int area() const = 0;
	virtual const char *name() const = 0;
};
struct Square : Shape {
	int side;
	explicit Square(int side) : side(side) {}
	int area() const override;
	const char *name() const override;
};
struct Circle : Shape {
	int radius;
	explicit Circle(int radius) : radius(radius) {}
	int area() const override;
	const char *name() const override;
};

KEEP int Square::area() const { return side * side * SIDE(1, 10); }
KEEP const char *Square::name() const { return "square"; }
KEEP int Circle::area() const { return 3 * radius * radius; }
KEEP const char *Circle::name() const { return "circle"; }

static Shape *shapes[2];

void answer()
{
	if (!shapes[0]) {
		shapes[0] = new Square(3);
		shapes[1] = new Circle(2);
	}
	printf("%s %d %s %d", shapes[0]->name(), shapes[0]->area(), shapes[1]->name(), shapes[1]->area());
}
