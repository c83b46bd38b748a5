//#Rule: byte tables and strings of wide characters
//#Expect: accept
//#Changed: classify
//#Output-before: 0 1 2 7
//#Output-after: 0 1 3 9
#include "case.h"
#include <wchar.h>

static const unsigned char classes[256] = { ['a'] = 1, ['b'] = SIDE(2, 3) };

KEEP int classify(char c) { return classes[(unsigned char)c]; }
KEEP int wide(void) { return (int)wcslen(SIDE(L"unicode", L"unicode!!")); }

void answer(void) { printf("%d %d %d %d", classify('x'), classify('a'), classify('b'), wide()); }
