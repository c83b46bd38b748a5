//#Rule: a lambda runs as a thread; its body and the function that makes it change
//#Expect: accept
//#Libs: -lpthread
//#Flags: -std=c++17
//#Changed: work
//#Opt: -O2 -O3
//#Output-before: 4
//#Output-after: 9
#include "case.h"
#include <thread>

KEEP int work(int n)
{
	int result = 0;
	std::thread thread([&result, n] { result = n * SIDE(2, 3); });

	thread.join();
	return result + SIDE(0, 3);
}

void answer() { printf("%d", work(2)); }
