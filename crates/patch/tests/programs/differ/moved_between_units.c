//#Rule: a function that moves to another unit takes the place of the one it was
//#Expect: accept
//#Changed: middle
//#Output-before: 1 1 1
//#Output-after: 2 2 2
#include "case.h"

int middle(int a);
int there(void);
int elsewhere(void);
KEEP int here(void) { return middle(0); }

#ifndef SP_AFTER
KEEP int middle(int a) { return a + 1; }
#endif

void answer(void) { printf("%d %d %d", here(), there(), elsewhere()); }
//#Unit: other.c
#include "case.h"

int middle(int a);

#ifdef SP_AFTER
KEEP int middle(int a) { return a + 2; }
#endif

KEEP int there(void) { return middle(0); }
//#Unit: third.c
#include "case.h"

int middle(int a);
KEEP int elsewhere(void) { return middle(0); }
