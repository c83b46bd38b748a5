// SPDX-License-Identifier: GPL-2.0
#define _GNU_SOURCE
#include "tool.h"

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

#define WORDS 20

char pid[16], said[8192];

pid_t start(char **words, int input, int output)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (child)
		return child;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (input >= 0)
		dup2(input, 0);
	if (output >= 0) {
		dup2(output, 1);
		dup2(output, 2);
	}
	execv(words[0], words);
	_exit(127);
}

static void words_of(char **words, const char *verb, va_list more)
{
	int count = 0;

	words[count++] = "/stillpoint";
	words[count++] = "patch";
	words[count++] = (char *)verb;
	words[count++] = "--pid";
	words[count++] = pid;
	while (count < WORDS - 1 && (words[count] = va_arg(more, char *)))
		count++;
	words[count] = NULL;
}

int run(char **words)
{
	int output[2], status;
	size_t length = 0;
	ssize_t got;

	CHECK(pipe2(output, O_CLOEXEC) == 0);
	pid_t child = start(words, -1, output[1]);

	close(output[1]);
	while (length < sizeof(said) - 1 && (got = read(output[0], said + length, sizeof(said) - 1 - length)) > 0)
		length += (size_t)got;
	said[length] = 0;
	close(output[0]);
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
	return WEXITSTATUS(status);
}

int tool(const char *verb, ...)
{
	char *words[WORDS];
	va_list more;

	va_start(more, verb);
	words_of(words, verb, more);
	va_end(more);
	return run(words);
}

unsigned long killed_at(unsigned long n, char **words, int *killed)
{
	char when[32], *traced[WORDS] = {"/kill_after", "/report", "writes", when};
	unsigned long writes;
	int status;

	snprintf(when, sizeof(when), "%lu+%d", n, rand() % 12);
	for (int i = 0; words[i]; i++)
		traced[4 + i] = words[i];
	CHECK(run(traced) == 0);
	FILE *report = fopen("/report", "r");

	CHECK(report && fscanf(report, "%*u %lu %*d %d", &writes, &status) == 2);
	fclose(report);
	*killed += WIFSIGNALED(status);
	return writes;
}

void wanted(int code, int wanted, int line)
{
	if (code == wanted)
		return;
	printf("# line %d: exit code %d instead of %d\n", line, code, wanted);
	for (char *at = strtok(said, "\n"); at; at = strtok(NULL, "\n"))
		printf("# %s\n", at);
	CHECK(!"the tool ends as it should");
}
