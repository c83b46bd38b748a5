//#Rule: a constructor that stays as it is does not stand in the way
//#Expect: accept
//#Changed: get
//#Output-before: 8
//#Output-after: 16
//#Has: .init_array
#include "case.h"

static int value = 1;

__attribute__((constructor)) static void start(void) { value += 7; }

KEEP int get(void) { return value * SIDE(1, 2); }

void answer(void) { printf("%d", get()); }
