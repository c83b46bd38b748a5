//#Rule: each thread reaches its own thread-local through patched code
//#Expect: accept
//#Libs: -lpthread
//#Changed: work
//#Output-before: 1 2 3 4
//#Output-after: 10 20 30 40
#include "case.h"
#include <pthread.h>

static __thread int mine;
static int results[4];

KEEP void work(int n)
{
	for (int i = 0; i < n; i++)
		mine += SIDE(1, 10);
}

static void *thread(void *p)
{
	int n = (int)(intptr_t)p;

	work(n);
	results[n - 1] = mine;
	return NULL;
}

void answer(void)
{
	pthread_t threads[4];

	for (intptr_t i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, thread, (void *)(i + 1));
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	printf("%d %d %d %d", results[0], results[1], results[2], results[3]);
}
