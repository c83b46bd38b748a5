//#Rule: a variadic function: the register count in al survives the redirection
//#Expect: accept
//#Changed: sum
//#Output-before: 6.5
//#Output-after: 13.0
#include "case.h"
#include <stdarg.h>

KEEP double sum(int n, ...)
{
	va_list list;
	double total = 0;

	va_start(list, n);
	for (int i = 0; i < n; i++)
		total += va_arg(list, double) * SIDE(1, 2);
	va_end(list);
	return total;
}

void answer(void) { printf("%.1f", sum(3, 1.0, 2.0, 3.5)); }
