//#Rule: a constant of inline code changes: all who read it have its source, and bring the new one
//#Patchable: no
//#Expect: accept
//#Flags: -std=c++17
//#Changed: here there
//#Output-before: 20 40
//#Output-after: 25 50
#include "case.h"
#include "shared.h"

KEEP int here(int n) { return Table<int>::rows[n & 3]; }

int there(int n);
void answer()
{
	int first = here(2);

	printf("%d %d", first, there(2));
}
//#Unit: other.cc
#include "case.h"
#include "shared.h"

KEEP int there(int n) { return 2 * Table<int>::rows[n & 3]; }
//#Header: shared.h
template <class T> struct Table {
	static const T rows[4];
};
template <class T> const T Table<T>::rows[4] = {10, 15, SIDE(20, 25), 30};
