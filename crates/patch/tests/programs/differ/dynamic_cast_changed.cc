//#Rule: changed code asks for the types of objects that unchanged code made
//#Expect: accept
//#Changed: kind
//#Output-before: left none
//#Output-after: left right
#include "case.h"
#include <typeinfo>

struct Node {
	virtual ~Node() = default;
};
struct Left : Node {
	int l = 1;
};
struct Right : Node {
	int r = 2;
};

KEEP const char *kind(Node *node)
{
	if (dynamic_cast<Left *>(node))
		return "left";
#ifdef SP_AFTER
	if (dynamic_cast<Right *>(node) && typeid(*node) == typeid(Right))
		return "right";
#endif
	return "none";
}

Node *nodes[2];

void answer()
{
	if (!nodes[0]) {
		nodes[0] = new Left;
		nodes[1] = new Right;
	}
	const char *first = kind(nodes[0]);
	printf("%s %s", first, kind(nodes[1]));
}
