//#Rule: sizeof stays, and members move: refused by name and offsets
//#Expect: refuse type-layout-changed
//#Refusal: member `lazy` moved from offset 0xc to 0x10
//#Refusal: member `more` added at offset 0xc
//#Output-before: 1 7 1
#include "case.h"

struct server {
	long port;
	int clients;
#ifdef SP_AFTER
	int more;
#endif
	char lazy;
	long end;
};

struct server server = { .port = 1, .clients = 7, .lazy = 1 };

KEEP int clients(void) { return server.clients SIDE(, + server.more); }

void answer(void) { printf("%ld %d %d", server.port, clients(), server.lazy); }
