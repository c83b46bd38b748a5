//#Rule: changed code reaches another unit's thread-local by its wrapper function
//#Expect: accept
//#Changed: next
//#Output-before: 8 | 9
//#Output-after: 19 | 29
//#Output-reverted: 30 | 31
#include "case.h"

extern thread_local int theirs;
KEEP int touch() { return theirs; }
KEEP int next() { return theirs += SIDE(1, 10); }

void answer()
{
	touch();
	printf("%d", next());
}
//#Unit: other.cc
#include "case.h"

KEEP int seven() { return 7; }
extern thread_local int theirs;
thread_local int theirs = seven();
