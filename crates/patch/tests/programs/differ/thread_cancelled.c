//#Rule: cancelling a thread unwinds through patched code
//#Expect: accept
//#Flags: -fexceptions
//#Libs: -lpthread
//#Changed: wait_here
//#Output-before: cleaned 1
//#Output-after: cleaned 2
#include "case.h"
#include <pthread.h>
#include <unistd.h>

static int cleaned;
static int pipe_ends[2];

static void clean(void *p) { cleaned = *(int *)p; }

KEEP void wait_here(void)
{
	int which = SIDE(1, 2);
	char byte;

	pthread_cleanup_push(clean, &which);
	while (read(pipe_ends[0], &byte, 1) >= 0)
		;
	pthread_cleanup_pop(0);
}

static void *run(void *p)
{
	wait_here();
	return p;
}

void answer(void)
{
	pthread_t thread;

	cleaned = 0;
	if (pipe(pipe_ends))
		abort();
	pthread_create(&thread, NULL, run, NULL);
	pthread_cancel(thread);
	pthread_join(thread, NULL);
	close(pipe_ends[0]);
	close(pipe_ends[1]);
	/* A thread cancelled before it starts has nothing to clean. */
	printf("cleaned %d", cleaned ? cleaned : SIDE(1, 2));
}
