//#Rule: thread-locals through TLS descriptors, kept by the linker in a library and relaxed in an executable
//#Expect: accept
//#Flags: -fPIC -mtls-dialect=gnu2
//#Opt: -O1 -O2 -O3
//#Libs: -lpthread
//#Changed: next several
//#Output-before: 8 11 3 | 9 18 6
//#Output-after: 19 42 18 | 29 53 30
//#Output-reverted: 30 54 33
#include "case.h"
#include <pthread.h>

extern __thread int calls;
static __thread int one = 3, two = 7;
static __thread long row[4];

KEEP int next(void) { return calls += SIDE(1, 10); }

/* Several at once: one descriptor for all of the module's. */
KEEP int several(int i)
{
	one += i;
	two ^= i + SIDE(0, 5);
	row[i] += SIDE(1, 1 + one);
	return one + two + (int)row[i] + (SIDE(0, calls - calls));
}

static void *thread(void *unused)
{
	return (void *)(intptr_t)(next() - 7);
}

void answer(void)
{
	static int other;
	pthread_t id;
	void *in_thread;

	pthread_create(&id, NULL, thread, NULL);
	pthread_join(id, &in_thread);
	other += (int)(intptr_t)in_thread + 2;
	int a = next();
	int b = several(3);

	printf("%d %d %d", a, b, other);
}
//#Unit: other.c
#include "case.h"

__thread char before_it = 3;
__thread int calls = 7;

KEEP int reset(void) { return calls = before_it; }
