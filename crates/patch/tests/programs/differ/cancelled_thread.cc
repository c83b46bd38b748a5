//#Rule: cancelling a thread unwinds through changed code and destroys its objects
//#Expect: accept
//#Libs: -lpthread
//#Changed: wait_here
//#Output-before: cleaned 1
//#Output-after: cleaned 2
#include "case.h"
#include <pthread.h>
#include <unistd.h>

static int cleaned;
static int pipe_ends[2], ready[2];

struct Guard {
	int which;
	~Guard();
};
KEEP Guard::~Guard() { cleaned = which; }

KEEP void wait_here()
{
	Guard guard = {SIDE(1, 2)};
	char byte = 0;

	if (write(ready[1], &byte, 1) != 1)
		abort();
	while (read(pipe_ends[0], &byte, 1) >= 0)
		;
}

static void *run(void *p)
{
	wait_here();
	return p;
}

void answer()
{
	pthread_t thread;
	char byte;

	cleaned = 0;
	if (pipe(pipe_ends) || pipe(ready))
		abort();
	pthread_create(&thread, NULL, run, NULL);
	if (read(ready[0], &byte, 1) != 1)
		abort();
	pthread_cancel(thread);
	pthread_join(thread, NULL);
	for (int end = 0; end < 2; end++) {
		close(pipe_ends[end]);
		close(ready[end]);
	}
	printf("cleaned %d", cleaned);
}
