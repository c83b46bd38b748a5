// SPDX-License-Identifier: GPL-2.0
/*
 * usage: generations [-s SECONDS] [-p] [-g] [NAME...]: all tests, or those named; SECONDS for each of the stress tests; -p: the
 * processor has PCID; -g: and INVLPGB: then each test begins with a global TLB context.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"
#include "stress.h"

static const struct test *const all[] = {
	basic_tests, life_tests, memory_tests, huge_tests, events_tests, debugger_tests, lookups_tests, probes_tests, groups_tests,
	user_tests, contexts_tests, global_tests, patching_tests, points_tests, servers_tests, stress_tests, absent_tests,
	refused_tests,
};

/* Returns true if this kernel has, or lacks, the feature that a test needs; a server is in a directory of the test's name. */
static bool possible(const struct test *tests, const char *name)
{
	bool absent = access("/proc/self/generations", F_OK) != 0;

	if (tests == global_tests && !processor_broadcasts)
		return false;
	if (tests == servers_tests && (chdir("/") || access(name, F_OK)))
		return false;
	if (tests == patching_tests || tests == points_tests || tests == servers_tests || tests == refused_tests)
		return absent == (tests == refused_tests) && access("/stillpoint", X_OK) == 0;
	return absent == (tests == absent_tests);
}

static bool chosen(const char *name, int count, char **names)
{
	if (!count)
		return true;
	while (count--)
		if (!strcmp(name, names[count]))
			return true;
	return false;
}

static bool exists(const char *name)
{
	for (size_t set = 0; set < sizeof(all) / sizeof(all[0]); set++)
		for (const struct test *test = all[set]; test->name; test++)
			if (!strcmp(test->name, name))
				return true;
	return false;
}

static bool passes(const struct test *test)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		alarm(test->limit_s);
		if (processor_broadcasts)
			take_global_context();
		test->run();
		fflush(stdout);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	if (WIFSIGNALED(status))
		printf("# ended by signal %d\n", WTERMSIG(status));
	return status == 0;
}

int main(int argc, char **argv)
{
	int number = 0, bad = 0, option;

	setvbuf(stdout, NULL, _IOLBF, 0);
	/* A test executes this program to check the generation after exec. */
	if (argc == 2 && !strcmp(argv[1], "--version-number"))
		return version();
	while ((option = getopt(argc, argv, "s:pg")) != -1) {
		if (option == 's')
			stress_s = atof(optarg);
		else if (option == 'p')
			processor_has_contexts = true;
		else if (option == 'g')
			processor_broadcasts = true;
		else
			return 2;
	}
	for (int i = optind; i < argc; i++)
		if (!exists(argv[i])) {
			printf("# no test %s\n", argv[i]);
			return 2;
		}
	puts("TAP version 13");
	for (size_t set = 0; set < sizeof(all) / sizeof(all[0]); set++)
		for (const struct test *test = all[set]; test->name; test++) {
			if (!possible(all[set], test->name) || !chosen(test->name, argc - optind, argv + optind))
				continue;
			double start = now_s();
			bool ok = passes(test);

			bad += !ok;
			printf("%s %d %s # %.1f s\n", ok ? "ok" : "not ok", ++number, test->name, now_s() - start);
		}
	printf("1..%d\n", number);
	return bad || !number;
}
