//#Rule: static locals of one name in functions that were inlined into one are told apart by the functions that declare them
//#Expect: accept
//#Changed: sum
//#Output-before: 2 1001 | 3 1002
//#Output-after: 13 1102 | 23 1202
//#Output-reverted: 24 1203
#include "case.h"

#define LEFT                                                                                                            \
	static inline __attribute__((always_inline)) int left(void)                                                     \
	{                                                                                                               \
		static int n = 1;                                                                                       \
		return n += SIDE(1, 10);                                                                                \
	}
#define RIGHT                                                                                                           \
	static inline __attribute__((always_inline)) int right(void)                                                    \
	{                                                                                                               \
		static int n = 1000;                                                                                    \
		return n += SIDE(1, 100);                                                                               \
	}

/* in another order, the compiler numbers them the other way round */
SIDE(LEFT RIGHT, RIGHT LEFT)

KEEP void sum(void)
{
	int l = left();

	printf("%d %d", l, right());
}

void answer(void) { sum(); }
