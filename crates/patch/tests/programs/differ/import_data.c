//#Rule: data of libc: copy relocations and GOT slots
//#Expect: accept
//#Changed: say
//#Output-before: out
//#Output-after: out!
#include "case.h"
#include <unistd.h>

extern char **environ;

KEEP void say(void) { fputs(environ ? SIDE("out", "out!") : "none", stdout); }

void answer(void) { say(); }
