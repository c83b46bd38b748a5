//#Rule: a type grown at its end is refused: the objects that live have the old size
//#Expect: refuse type-layout-changed
//#Refusal: type `struct session` changed: member `limit` added at offset 0x8; size changed from 8 to 12 bytes
//#Output-before: 7
#include "case.h"

struct session {
	int id;
	int used;
#ifdef SP_AFTER
	int limit;
#endif
};

KEEP int use(struct session *s)
{
#ifdef SP_AFTER
	s->limit = 3;
#endif
	return s->id + s->used;
}

void answer(void)
{
	struct session *s = calloc(1, sizeof *s);

	s->id = 7;
	printf("%d", use(s));
	free(s);
}
