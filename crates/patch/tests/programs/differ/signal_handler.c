//#Rule: a signal handler that is patched
//#Expect: accept
//#Changed: handler
//#Output-before: 1
//#Output-after: 2
#include "case.h"
#include <signal.h>

static volatile sig_atomic_t seen;

static KEEP void handler(int number) { seen = number ? SIDE(1, 2) : 0; }

void answer(void)
{
	static int ready;

	if (!ready) {
		signal(SIGUSR1, handler);
		ready = 1;
	}
	raise(SIGUSR1);
	printf("%d", seen);
}
