//#Rule: an enumerator of an enum class gets another value
//#Expect: refuse type-layout-changed
//#Refusal: enumerator `green` changed from 1 to 2
//#Output-before: 1
#include "case.h"

namespace paint {
enum class Colour : unsigned char {
	red,
#ifdef SP_AFTER
	blue,
#endif
	green,
};
}
KEEP int number(paint::Colour colour) { return static_cast<int>(colour) + SIDE(0, 1); }

void answer() { printf("%d", number(static_cast<paint::Colour>(1))); }
