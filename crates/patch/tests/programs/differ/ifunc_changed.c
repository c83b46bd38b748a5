//#Rule: an indirect function of the target whose resolver changed is refused: it has run already
//#Expect: refuse indirect-function
//#Refusal: `work`
//#Output-before: 1
#include "case.h"

static int slow(void) { return 1; }
static int fast(void) { return 2; }

static void *resolve(void) { return SIDE(slow, fast); }
int work(void) __attribute__((ifunc("resolve")));

KEEP int unused(int i) { return i ? slow() : fast(); }

void answer(void) { printf("%d", work()); }
