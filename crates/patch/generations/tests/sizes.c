// SPDX-License-Identifier: GPL-2.0
/*
 * A program of a given size is patched by generations, by trampolines, and forked (VLDB 2025, figure 9): the time for which its threads
 * are stopped. Lines in the form of costs.c; the clock may count instructions.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "tool.h"

#define ROUNDS 3

static FILE *commands, *answers;
static pid_t program;

static void start_program(const char *mib)
{
	int to[2], from[2];

	CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
	program = start((char *[]){"/victim", (char *)mib, NULL}, to[0], from[1]);
	snprintf(pid, sizeof(pid), "%d", program);
	commands = fdopen(to[1], "w");
	answers = fdopen(from[0], "r");
	close(to[0]);
	close(from[1]);
	setvbuf(commands, NULL, _IOLBF, 0);
}

static long forked_ns(void)
{
	long ns;

	fputs("fork\n", commands);
	CHECK(fscanf(answers, " fork %ld", &ns) == 1);
	return ns;
}

/* Times that an operation reports of itself, in nanoseconds. */
struct operation {
	long longest, sum, all;
};

static long number(const char *line, const char *name)
{
	const char *at = strstr(line, name);

	return at ? atol(at + strlen(name)) : 0;
}

static struct operation operation(char *verb, char *view)
{
	char *words[] = {"/stillpoint", "patch", verb, "--json", "--pid", pid, "--view", view,
			 *verb == 'a' ? "/fix.patch" : NULL, NULL};
	struct operation told = {0};
	int output[2], status;
	char line[4096];

	CHECK(pipe2(output, O_CLOEXEC) == 0);
	pid_t child = start(words, -1, output[1]);

	close(output[1]);
	FILE *lines = fdopen(output[0], "r");

	while (fgets(line, sizeof(line), lines)) {
		long stood = number(line, "\"stopped_ns\":");

		told.sum += stood;
		if (stood > told.longest)
			told.longest = stood;
		if (strstr(line, "\"committed\""))
			told.all = number(line, "\"duration_ns\":");
	}
	fclose(lines);
	CHECK(waitpid(child, &status, 0) == child && status == 0 && told.all);
	return told;
}

static void say(const char *what, const char *view, const char *mib, double ns)
{
	printf("# cost: %s%s-%s %.3f\n", what, view, mib, ns / 1000);
}

/* Returns the median of an odd number of values. */
static long median(long *of, int count)
{
	for (int i = 1; i < count; i++)
		for (int j = i; j && of[j] < of[j - 1]; j--) {
			long other = of[j];

			of[j] = of[j - 1];
			of[j - 1] = other;
		}
	return of[count / 2];
}

static void patched(char *view, const char *mib)
{
	long longest[2 * ROUNDS + 1] = {0}, sum[2 * ROUNDS + 1], all[2 * ROUNDS + 1];
	int count = 0;

	/* the first one loads the patch: its memory stays */
	operation("apply", view);
	operation("revert", view);
	for (int i = 0; i < ROUNDS; i++)
		for (int back = 0; back < 2; back++) {
			struct operation told = operation(back ? "revert" : "apply", view);

			longest[count] = told.longest;
			sum[count] = told.sum;
			all[count++] = told.all;
		}
	say("longest-stand-", view, mib, median(longest, count));
	say("all-stands-", view, mib, median(sum, count));
	say("operation-", view, mib, median(all, count));
}

int main(void)
{
	static const char *sizes[] = {"16", "64", "256", "1024", "2048", "4096"};
	struct sysinfo memory;

	setvbuf(stdout, NULL, _IOLBF, 0);
	CHECK(sysinfo(&memory) == 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		long forks[ROUNDS];
		int seen;

		if ((strtoul(sizes[i], NULL, 10) + 512) << 20 > memory.totalram * memory.mem_unit)
			break;
		start_program(sizes[i]);
		/* it has touched all its memory */
		fputs("look\n", commands);
		CHECK(fscanf(answers, " old %d new %*d wrong %*d", &seen) == 1 && seen);
		patched("generation", sizes[i]);
		patched("trampoline", sizes[i]);
		for (int round = 0; round < ROUNDS; round++)
			forks[round] = forked_ns();
		say("fork", "", sizes[i], median(forks, ROUNDS));
		kill(program, SIGKILL);
		CHECK(waitpid(program, NULL, 0) == program);
		fclose(commands);
		fclose(answers);
	}
	return 0;
}
