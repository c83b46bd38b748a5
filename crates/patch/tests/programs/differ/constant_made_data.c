//#Rule: a constant that becomes data is refused, as new code may write to it
//#Expect: refuse variable-changed
//#Refusal: changed from constant to initialised
//#Output-before: a
#include "case.h"

static SIDE(const, ) char letters[] = "abcdefghijklmnopqrstuvwxyz";

KEEP int letter(int at) { SIDE(, letters[at]++); return letters[at]; }

void answer(void) { printf("%c", letter(0)); }
