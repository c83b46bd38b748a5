/* SPDX-License-Identifier: GPL-2.0 */
/* Programs started beside the tests, and `stillpoint patch` on one of them. */
#ifndef TOOL_H
#define TOOL_H

#include <sys/types.h>

/* Exit codes of stillpoint(1). */
enum { DONE = 0, REFUSED = 3, FELL_BACK = 4 };

/* Of the program that tool() is about. */
extern char pid[16];
/* What run() printed last. */
extern char said[8192];

/* The program's words end with NULL; it ends with the test. Descriptors below 0 are the test's own. */
pid_t start(char **words, int input, int output);
/* Runs a program to its end; its exit code. */
int run(char **words);
/* Runs `stillpoint patch VERB --pid PID ...`, words up to a NULL; its exit code. */
int tool(const char *verb, ...);
/*
 * Runs the tool and kills it soon after it was to write into another process for the nth time, or right before
 * (kill_after.c of the patch tests): how often it came to write. One that ends before that is not counted in `killed`.
 */
unsigned long killed_at(unsigned long n, char **words, int *killed);
/* What was printed is shown if the code is another than wanted. */
void wanted(int code, int wanted, int line);

#define ENDS(code, call) wanted(call, code, __LINE__)

#endif
