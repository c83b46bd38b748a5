//#Rule: the body of a coroutine changes; one that is suspended ends as the old code has it
//#Expect: accept
//#Compiler: gnu
//#Flags: -std=c++20
//#Changed: _Z7numbers*
//#Opt: -O2 -O3
//#Output-before: 1 2
//#Output-after: 10 20
#include "case.h"
#include <coroutine>

struct Numbers {
	struct promise_type {
		int value = 0;
		Numbers get_return_object()
		{
			return Numbers{std::coroutine_handle<promise_type>::from_promise(*this)};
		}
		std::suspend_always initial_suspend() { return {}; }
		std::suspend_always final_suspend() noexcept { return {}; }
		std::suspend_always yield_value(int n)
		{
			value = n;
			return {};
		}
		void return_void() {}
		void unhandled_exception() {}
	};
	std::coroutine_handle<promise_type> handle;
};

static Numbers numbers()
{
	co_yield SIDE(1, 10);
	co_yield SIDE(2, 20);
}

void answer()
{
	Numbers all = numbers();

	all.handle.resume();
	printf("%d", all.handle.promise().value);
	all.handle.resume();
	printf(" %d", all.handle.promise().value);
	all.handle.destroy();
}
