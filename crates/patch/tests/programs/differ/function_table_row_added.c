//#Rule: a command table that gains a row is refused
//#Expect: refuse variable-changed
//#Refusal: `commands`
//#Output-before: 2
#include "case.h"

struct command { const char *name; int (*run)(void); };

KEEP int get(void) { return 1; }
KEEP int set(void) { return 2; }
struct command commands[] = {
	{ "get", get },
	{ "set", set },
#ifdef SP_AFTER
	{ "add", get },
#endif
};

KEEP int run(const char *name)
{
	for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
		if (!strcmp(commands[i].name, name))
			return commands[i].run();
	return 0;
}

void answer(void) { printf("%d", run("set")); }
