//#Rule: a program whose main has work inlined, with the change in a function below it
//#Expect: accept
//#Link: pie nopie
//#Main: own
//#Changed: value
//#Unchanged: main
//#Output-before: 1
//#Output-after: 2
#include "case.h"

KEEP int value(void) { return SIDE(1, 2); }

int main(void)
{
	char question[64];

	while (fgets(question, sizeof question, stdin)) {
		printf("%d\n", value());
		fflush(stdout);
	}
	return 0;
}
