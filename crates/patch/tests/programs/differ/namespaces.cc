//#Rule: types of one name in two namespaces are two types: each keeps its own layout
//#Expect: accept
//#Changed: one::get
//#Unchanged: two::get
//#Output-before: 1 7
//#Output-after: 2 7
#include "case.h"

namespace one {
struct Node {
	int n;
};
KEEP int get(const Node &node) { return node.n + SIDE(0, 1); }
}
namespace two {
inline namespace v2 {
struct Node {
	long pad, n;
};
}
KEEP long get(const Node &node) { return node.n; }
}

void answer() { printf("%d %ld", one::get(one::Node{1}), two::get(two::Node{0, 7})); }
