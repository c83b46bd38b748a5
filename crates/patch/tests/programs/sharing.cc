/* A shared library with inline code, of which the program sharer.cc has a copy too. */
#include "control.h"

#define VERSION 1

/* The same text in both, as a header would bring it. */
PATCHED inline long shared_rule(long x) { return x * 48 + VERSION; }

extern "C" long library_rule(long x);
extern "C" long library_rule(long x) { return shared_rule(x); }
