//#Rule: an enumerator is added to an enum class, and code handles it
//#Expect: accept
//#Changed: name
//#Output-before: red other
//#Output-after: red blue
#include "case.h"

enum class Colour : unsigned char {
	red,
	green,
#ifdef SP_AFTER
	blue,
#endif
};

KEEP const char *name(Colour colour)
{
	switch (colour) {
	case Colour::red:
		return "red";
	case Colour::green:
		return "green";
#ifdef SP_AFTER
	case Colour::blue:
		return "blue";
#endif
	default:
		return "other";
	}
}

void answer()
{
	const char *first = name(Colour::red);

	printf("%s %s", first, name(static_cast<Colour>(2)));
}
