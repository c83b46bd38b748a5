/* The server around every directive program: one answer to each line. */
#include <stdio.h>

void answer(void);

int main(void)
{
	char question[64];

	while (fgets(question, sizeof question, stdin)) {
		answer();
		putchar('\n');
		fflush(stdout);
	}
	return 0;
}
