//#Rule: a thread-local of libc, through its accessor
//#Expect: accept
//#Changed: check
//#Output-before: 0 2
//#Output-after: 2 2
#include "case.h"
#include <errno.h>
#include <unistd.h>

KEEP int check(void)
{
	errno = 0;
	return access("/nonexistent", F_OK) SIDE(* 0, * 0 + errno);
}

void answer(void)
{
	int a = check();

	printf("%d %d", a, errno);
}
