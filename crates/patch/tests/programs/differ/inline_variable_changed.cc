//#Rule: the initial value of an inline variable changes
//#Expect: refuse data-changed
//#Refusal: initialised data `limit` of inline_variable_changed.cc changed
//#Flags: -std=c++17
//#Output-before: 10
#include "case.h"

inline int limit = SIDE(10, 20);

KEEP int get() { return limit; }

void answer() { printf("%d", get()); }
