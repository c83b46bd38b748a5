/* SPDX-License-Identifier: GPL-2.0 */
/* Programs started beside the tests, and `stillpoint patch` on one of them. */
#ifndef TOOL_H
#define TOOL_H

#include <sys/types.h>

/* Exit codes of stillpoint(1). */
enum { DONE = 0, REFUSED = 3, FELL_BACK = 4 };

/* Pid of the program that tool() works on. */
extern char pid[16];
/* Last output of run(). */
extern char said[8192];

/* The program's words end with NULL; it ends with the test. Descriptors below 0 are the test's own. */
pid_t start(char **words, int input, int output);
/* Runs a program to its end; returns its exit code. */
int run(char **words);
/* Runs `stillpoint patch VERB --pid PID ...`, words up to a NULL; returns its exit code. */
int tool(const char *verb, ...);
/*
 * Runs the tool and kills it soon after its nth write into another process was due, or right before it (kill_after.c of the patch
 * tests); returns the number of writes that were due. A tool that ends before that is not counted in `killed`.
 */
unsigned long killed_at(unsigned long n, char **words, int *killed);
/* Prints the output if the code differs from the expected one. */
void wanted(int code, int wanted, int line);

#define ENDS(code, call) wanted(call, code, __LINE__)

#endif
