//#Rule: a switch that the compiler makes a table of distances (from the table's start): one row, its text, is another one
//#Expect: accept
//#Compiler: clang
//#Opt: -O2 -O3
//#Link: pie shared
//#Has: .rela.rodata
//#Changed: name rank
//#Unchanged: other
//#Output-before: first second third 11 44 one four six
//#Output-after: first 2nd third 11 55 one four six
#include "case.h"

/* Whose distances are those of the table's own rows from texts and numbers that the linker merges, and keeps. */
KEEP const char *name(int n)
{
	switch (n) {
	case 0:
		return "first";
	case 1:
		return SIDE("second", "2nd");
	case 2:
		return "third";
	case 3:
		return "fourth";
	default:
		return "none";
	}
}

static const int eleven[] = {11, 12}, twenty[] = {22, 23}, thirty[] = {33, 34}, forty[] = {44, 55};

KEEP const int *rank(int n)
{
	switch (n) {
	case 0:
		return eleven;
	case 1:
		return twenty;
	case 2:
		return thirty;
	case 3:
		return SIDE(forty, forty + 1);
	default:
		return nullptr;
	}
}

/* The same in code that stays as it is. */
KEEP const char *other(int n)
{
	switch (n) {
	case 0:
		return "one";
	case 1:
		return "four";
	case 2:
		return "twenty six" + 7;
	case 3:
		return "six";
	default:
		return "none";
	}
}

void answer()
{
	printf("%s %s %s %d %d %s %s %s", name(0), name(1), name(2), *rank(0), *rank(3), other(0), other(1), other(2));
}
