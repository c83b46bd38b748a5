//#Rule: an assertion added: __func__ and the file's name come along
//#Expect: accept
//#Changed: half
//#Output-before: 1
//#Output-after: 2
#include "case.h"
#include <assert.h>

KEEP int half(int n)
{
#ifdef SP_AFTER
	assert(n % 2 == 0);
#line 16
#endif
	return n / 2 - SIDE(1, 0);
}

void answer(void) { printf("%d", half(4)); }
