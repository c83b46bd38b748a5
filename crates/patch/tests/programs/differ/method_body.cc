//#Rule: the body of a method changes
//#Expect: accept
//#Changed: Counter::next
//#Unchanged: Counter::Counter Counter::reset
//#Output-before: 1 2
//#Output-after: 10 20
#include "case.h"

class Counter {
public:
	Counter();
	int next();
	void reset();

private:
	int value;
};

KEEP Counter::Counter() : value(0) {}
KEEP int Counter::next() { return value += SIDE(1, 10); }
KEEP void Counter::reset() { value = 0; }

static Counter counter;

void answer()
{
	int first = counter.next();

	printf("%d %d", first, counter.next());
	counter.reset();
}
