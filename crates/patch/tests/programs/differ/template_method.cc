//#Rule: a method of a class template changes in one of its instances that the program has
//#Expect: accept
//#Changed: Stack<int>::push Stack<char>::push
//#Unchanged: Stack<int>::size
//#Output-before: 1 1
//#Output-after: 2 2
#include "case.h"

template <class T> class Stack {
public:
	KEEP void push(T value)
	{
		for (int i = 0; i < SIDE(1, 2); i++)
			items[count++ % 8] = value;
	}
	KEEP int size() const
	{
		asm volatile("");
		return count;
	}

private:
	T items[8] = {};
	int count = 0;
};

void answer()
{
	Stack<int> numbers;
	Stack<char> letters;

	numbers.push(1);
	letters.push('a');
	printf("%d %d", numbers.size(), letters.size());
}
