//#Rule: floating-point constants live in merged constant sections
//#Expect: accept
//#Changed: area
//#Unchanged: other
//#Output-before: 12.56 2.718
//#Output-after: 12.566 2.718
//#Has: .rodata.cst8
#include "case.h"

KEEP double area(double r) { return SIDE(3.14, 3.1415) * r * r; }
KEEP double other(double x) { return x * 2.718; }

void answer(void) { printf("%g %g", area(2), other(1)); }
