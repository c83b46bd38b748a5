//#Rule: a new static local with a constructor comes with a guard of its own, and is made once
//#Expect: accept
//#Changed: next
//#Warning: the patch has no scope
//#Output-before: none | none
//#Output-after: made 1 | 2
#include "case.h"

struct Count {
	int value;
	Count();
};
KEEP Count::Count() : value(0) { printf("made "); }

/* What uses the C++ library already. */
KEEP void other(int n)
{
	static Count *count = n ? new Count : NULL;

	delete count;
	if (n)
		throw n;
}

KEEP void next()
{
#ifdef SP_AFTER
	static Count count;

	printf("%d", ++count.value);
#else
	printf("none");
#endif
}

void answer()
{
	other(0);
	next();
}
