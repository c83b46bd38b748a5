//#Rule: std::variant visited by changed code, with tables that the compiler makes
//#Expect: accept
//#Flags: -std=c++17
//#Changed: describe
//#Opt: -O2 -O3
//#Output-before: int 3 text x
//#Output-after: number 3 word x
#include "case.h"
#include <string>
#include <variant>

using Value = std::variant<int, std::string>;

struct Printer {
	void operator()(int n) const { printf(SIDE("int %d", "number %d"), n); }
	void operator()(const std::string &text) const { printf(SIDE(" text %s", " word %s"), text.c_str()); }
};

KEEP void describe(const Value &value)
{
	std::visit(Printer(), value);
}

void answer()
{
	describe(Value(3));
	describe(Value(std::string("x")));
}
