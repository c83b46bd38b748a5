//#Rule: changed code makes an object of a class that is new, with a table of virtual functions of its own
//#Expect: accept
//#Changed: make
//#Unchanged: tell
//#Output-before: plain 3
//#Output-after: special 4
#include "case.h"

struct Plain {
	virtual ~Plain() = default;
	virtual const char *name() const { return "plain"; }
	virtual int value() const { return 3; }
};
#ifdef SP_AFTER
struct Special : Plain {
	const char *name() const override { return "special"; }
	int value() const override { return Plain::value() + 1; }
};
#else
typedef Plain Special;
#endif

KEEP Plain *make() { return new Special; }
KEEP void tell(const Plain *plain) { printf("%s %d", plain->name(), plain->value()); }

void answer()
{
	Plain *made = make();

	tell(made);
	delete made;
}
