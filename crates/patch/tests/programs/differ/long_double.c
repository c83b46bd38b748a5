//#Rule: x87 and 128-bit arithmetic
//#Expect: accept
//#Changed: mix
//#Output-before: 1.5 18446744073709551616
//#Output-after: 2.5 18446744073709551617
#include "case.h"

KEEP void mix(long double *l, unsigned __int128 *i)
{
	*l += SIDE(0.5L, 1.5L);
	*i = ((unsigned __int128)1 << 64) + SIDE(0, 1);
}

void answer(void)
{
	long double l = 1;
	unsigned __int128 i;

	mix(&l, &i);
	/* 2^64 and a little: print it by halves */
	printf("%Lg 1844674407370955161%u", l, (unsigned)(6 + (unsigned)i));
}
