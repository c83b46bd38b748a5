//#Rule: a new constructor is refused: start-up is over
//#Expect: refuse init-array
//#Refusal: .init_array
//#Output-before: 1
#include "case.h"

static int value = 1;

#ifdef SP_AFTER
__attribute__((constructor)) static void start(void) { value++; }
#endif

KEEP int get(void) { return value SIDE(, * 2 - value); }

void answer(void)
{
	printf("%d", get());
	value = 1;
}
