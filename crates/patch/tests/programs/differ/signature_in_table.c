//#Rule: a signature may not change while a table holds the function
//#Expect: refuse signature-changed
//#Refusal: data `table` holds its address
//#Output-before: 6
#include "case.h"

typedef int (*operation)(int);
#ifdef SP_AFTER
static KEEP int scale(int a, int more) { return a * 2 + more; }
#else
static KEEP int scale(int a) { return a * 2; }
#endif
operation table[] = { (operation)(void (*)(void))scale };

void answer(void) { printf("%d", table[0](3)); }
