//#Rule: changed code throws, unchanged code catches
//#Expect: accept
//#Changed: check
//#Unchanged: attempt
//#Output-before: 7 fine
//#Output-after: 70 too large
#include "case.h"

struct Refused {
	int code;
	const char *why;
};

KEEP void check(int n)
{
	if (n > SIDE(10, 5))
		throw Refused{n * 10, "too large"};
}

KEEP Refused attempt(int n)
{
	try {
		check(n);
	} catch (const Refused &refused) {
		return refused;
	}
	return Refused{n, "fine"};
}

void answer()
{
	Refused result = attempt(7);

	printf("%d %s", result.code, result.why);
}
