//#Rule: a method has a cold part that ends in a throw; both change
//#Expect: accept
//#Opt: -O2 -O3
//#Compiler: gnu
//#Has: _ZN6Ledger4takeEi.cold
//#Changed: Ledger::take
//#Output-before: 5 missing 3
//#Output-after: 5 lacking 30
#include "case.h"

struct Missing {
	const char *what;
	int n;
};
struct Ledger {
	int held;
	int take(int n);
};

__attribute__((cold, noinline)) static void complain(int n) { printf(" %s", n ? "" : "?"); }

KEEP int Ledger::take(int n)
{
	if (__builtin_expect(n > held, 0)) {
		complain(n);
		throw Missing{SIDE("missing", "lacking"), (n - held) * SIDE(1, 10)};
	}
	held -= n;
	return held;
}

void answer()
{
	Ledger ledger = {10};

	printf("%d", ledger.take(5));
	try {
		ledger.take(8);
	} catch (const Missing &missing) {
		printf("%s %d", missing.what, missing.n);
	}
}
