//#Rule: changed code uses a thread-local with a constructor: threads that have it keep it, new ones make it
//#Expect: accept
//#Libs: -lpthread
//#Changed: next
//#Output-before: 5 5 | 6 5
//#Output-after: 16 14 | 26 14
//#Output-reverted: 27 5 | 28 5
#include "case.h"
#include <pthread.h>

struct Count {
	int value;
	Count();
	~Count();
};
KEEP Count::Count() : value(4) {}
KEEP Count::~Count() { value = 0; }

static thread_local Count mine;

KEEP int next() { return mine.value += SIDE(1, 10); }

static int other;
static void *run(void *p)
{
	other = next();
	return p;
}

void answer()
{
	pthread_t thread;
	int here = next();

	pthread_create(&thread, NULL, run, NULL);
	pthread_join(thread, NULL);
	printf("%d %d", here, other);
}
