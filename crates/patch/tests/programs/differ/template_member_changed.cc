//#Rule: a class template's member changes its type: every instance is named
//#Expect: refuse type-layout-changed
//#Refusal: Box<int>` changed
//#Output-before: 3
#include "case.h"

template <class T> struct Box {
	T value;
#ifdef SP_AFTER
	long uses;
#else
	int uses;
#endif
	KEEP T get()
	{
		uses++;
		return value;
	}
};

static Box<int> box;

void answer()
{
	box.value = 3;
	printf("%d", box.get());
}
