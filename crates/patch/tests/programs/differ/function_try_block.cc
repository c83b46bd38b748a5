//#Rule: a constructor with a try block of its own changes; its member is destroyed when it throws
//#Expect: accept
//#Changed: Owner::Owner
//#Output-before: made, member gone, told 1, caught 1
//#Output-after: made, member gone, told 2, caught 2
#include "case.h"

struct Member {
	Member();
	~Member();
};
KEEP Member::Member() { printf("made"); }
KEEP Member::~Member() { printf(", member gone"); }

struct Owner {
	Member member;
	explicit Owner(int code);
};
KEEP void fail(int code) { throw code; }
KEEP Owner::Owner(int code)
try {
	fail(code * SIDE(1, 2));
} catch (int n) {
	printf(", told %d", n);
}

void answer()
{
	try {
		Owner owner(1);
	} catch (int n) {
		printf(", caught %d", n);
	}
}
