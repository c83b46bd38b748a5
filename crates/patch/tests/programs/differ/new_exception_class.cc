//#Rule: changed code throws a class that is new with the patch; unchanged code catches its base
//#Expect: accept
//#Changed: work
//#Unchanged: attempt
//#Output-before: std error
//#Output-after: new error
#include "case.h"
#include <exception>

struct Failure : std::exception {
	const char *what() const noexcept override;
};
KEEP const char *Failure::what() const noexcept { return "std error"; }

#ifdef SP_AFTER
struct NewFailure : Failure {
	const char *what() const noexcept override { return "new error"; }
};
#else
typedef Failure NewFailure;
#endif

KEEP void work() { throw NewFailure(); }

KEEP void attempt()
{
	try {
		work();
	} catch (const std::exception &failure) {
		printf("%s", failure.what());
	}
}

void answer() { attempt(); }
