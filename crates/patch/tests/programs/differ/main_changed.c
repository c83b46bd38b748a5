//#Rule: main itself changed: it never leaves the stack, and the engine says so
//#Expect: accept
//#Link: pie nopie
//#Main: own
//#Live: busy main
//#Changed: main
//#Output-before: 1
//#Output-after: 2
#include "case.h"

int main(void)
{
	char question[64];

	while (fgets(question, sizeof question, stdin)) {
		printf("%d\n", SIDE(1, 2));
		fflush(stdout);
	}
	return 0;
}
