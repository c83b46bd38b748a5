//#Rule: a statically initialised lock keeps its state
//#Expect: accept
//#Libs: -lpthread
//#Changed: enter
//#Output-before: 1 | 2
//#Output-after: 12
//#Output-reverted: 13
#include "case.h"
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int entered;

KEEP int enter(void)
{
	int n;

	pthread_mutex_lock(&lock);
	n = entered += SIDE(1, 10);
	pthread_mutex_unlock(&lock);
	return n;
}

void answer(void) { printf("%d", enter()); }
