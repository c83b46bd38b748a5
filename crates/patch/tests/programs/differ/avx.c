//#Rule: vector code with 32-byte constants, which want their alignment
//#Expect: accept
//#Flags: -mavx2
//#Needs: avx2
//#Changed: mix
//#Output-before: 36
//#Output-after: 72
//#Has: .rodata.cst32
#include "case.h"

typedef int vec __attribute__((vector_size(32)));

KEEP vec mix(vec v) { return v * SIDE(((vec){ 1, 1, 1, 1, 1, 1, 1, 1 }), ((vec){ 2, 2, 2, 2, 2, 2, 2, 2 })); }

void answer(void)
{
	vec v = mix((vec){ 1, 2, 3, 4, 5, 6, 7, 8 });
	int sum = 0;

	for (int i = 0; i < 8; i++)
		sum += v[i];
	printf("%d", sum);
}
