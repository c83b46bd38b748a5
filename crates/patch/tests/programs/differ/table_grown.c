//#Rule: new code has a copy of a static table that grows, with the author's permission, if all code that names it changes
//#Expect: accept
//#Data: fruits lists
//#Opt: -O2 -O3
//#Changed: find names
//#Unchanged: length
//#Warning: `lists`
//#Output-before: 1 -1 2 7
//#Output-after: 1 3 3 7
#include "case.h"
#include <string.h>

static const char *fruits[] = {
	"pear",
	"apple",
#ifdef SP_AFTER
	"kiwi",
	"fig",
#endif
	0,
};
static const char *berries[] = { "goose", "black", 0 };
static const char **lists[] = {
	fruits,
	berries,
#ifdef SP_AFTER
	fruits,
#endif
	0,
};

KEEP int length(const char *text) { return strlen(text); }

KEEP int find(const char *name)
{
	const char ***list, **entry;

	for (list = lists; *list; ++list)
		for (entry = *list; *entry; ++entry)
			if (strcmp(*entry, name) == 0)
				return entry - *list;
	return -1;
}

KEEP int names(void)
{
	int n = 0;

	while (lists[n])
		n++;
	return n;
}

void answer(void) { printf("%d %d %d %d", find("black"), find("fig"), names(), length("seven..")); }
