//#Rule: changed code needs instances of library templates that the program does not have
//#Expect: accept
//#Changed: total
//#Output-before: 6
//#Output-after: 6.6 of 3
#include "case.h"
#include <algorithm>
#include <map>
#include <vector>

KEEP void total(const int *values, int n)
{
#ifdef SP_AFTER
	std::map<int, double> by_value;

	for (int i = 0; i < n; i++)
		by_value[-values[i]] = values[i] * 1.1;
	double sum = 0;
	for (const auto &entry : by_value)
		sum += entry.second;
	printf("%.1f of %zu", sum, by_value.size());
#else
	std::vector<int> copy(values, values + n);

	std::sort(copy.begin(), copy.end());
	int sum = 0;
	for (int value : copy)
		sum += value;
	printf("%d", sum);
#endif
}

void answer()
{
	const int values[] = {3, 1, 2};

	total(values, 3);
}
