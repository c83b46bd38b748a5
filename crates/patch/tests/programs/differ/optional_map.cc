//#Rule: the program's own map is searched by changed code that throws when it finds nothing
//#Expect: accept
//#Flags: -std=c++17
//#Changed: find
//#Output-before: 1 missing
//#Output-after: 1 no c here
#include "case.h"
#include <map>
#include <stdexcept>
#include <string>

static std::map<std::string, int> *all;

KEEP int find(const std::string &key)
{
	auto found = all->find(key);

	if (found == all->end())
		throw std::out_of_range(SIDE(std::string("missing"), "no " + key + " here"));
	return found->second;
}

void answer()
{
	if (!all)
		all = new std::map<std::string, int>{{"a", 1}, {"b", 2}};
	printf("%d ", find("a"));
	try {
		find("c");
	} catch (const std::exception &problem) {
		printf("%s", problem.what());
	}
}
