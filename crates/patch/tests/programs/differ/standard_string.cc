//#Rule: changed code works with strings of the library, whose templates the program has already
//#Expect: accept
//#Changed: describe
//#Output-before: <a long name that does not fit in place: 3>
//#Output-after: [a long name that does not fit in place; 3]
#include "case.h"
#include <string>

KEEP std::string describe(const std::string &name, int n)
{
	return SIDE("<", "[") + name + SIDE(": ", "; ") + std::to_string(n) + SIDE(">", "]");
}

void answer() { printf("%s", describe("a long name that does not fit in place", 3).c_str()); }
