//#Rule: the start function of threads
//#Expect: accept
//#Libs: -lpthread
//#Changed: run
//#Output-before: 1 2
//#Output-after: 10 20
#include "case.h"
#include <pthread.h>

static KEEP void *run(void *p) 
{
	ROOM;
	return (void *)((intptr_t)p * SIDE(1, 10));
}

void answer(void)
{
	pthread_t a, b;
	void *first, *second;

	pthread_create(&a, NULL, run, (void *)1);
	pthread_create(&b, NULL, run, (void *)2);
	pthread_join(a, &first);
	pthread_join(b, &second);
	printf("%d %d", (int)(intptr_t)first, (int)(intptr_t)second);
}
