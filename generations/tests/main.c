// SPDX-License-Identifier: GPL-2.0
/* usage: generations [-s SECONDS] [NAME...]: all tests, or those named; SECONDS for each of the stress tests. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"
#include "stress.h"

_Noreturn void failed(const char *file, int line, const char *what)
{
	printf("# %s:%d: %s (%s)\n", file, line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static __thread sigjmp_buf after_fault;

static void on_fault(int signal)
{
	(void)signal;
	siglongjmp(after_fault, 1);
}

bool faults(const volatile char *at)
{
	struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_NODEFER}, before;
	volatile bool faulted = true;

	CHECK(sigaction(SIGSEGV, &action, &before) == 0);
	if (!sigsetjmp(after_fault, 0)) {
		(void)*at;
		faulted = false;
	}
	CHECK(sigaction(SIGSEGV, &before, NULL) == 0);
	return faulted;
}

struct call {
	void (*run)(void *);
	void *argument;
};

static void *called(void *argument)
{
	struct call *call = argument;

	call->run(call->argument);
	return NULL;
}

void in_thread(void (*run)(void *), void *argument)
{
	struct call call = {run, argument};
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, called, &call) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
}

void nap(void)
{
	nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

bool child_succeeds(int child)
{
	int status;

	CHECK(waitpid(child, &status, 0) == child);
	return status == 0;
}

double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static const struct test *const all[] = {
	basic_tests, life_tests, memory_tests, huge_tests, events_tests, debugger_tests, lookups_tests,
	stress_tests,
};

static bool chosen(const char *name, int count, char **names)
{
	if (!count)
		return true;
	while (count--)
		if (!strcmp(name, names[count]))
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
	/* What exec leaves of a generation is looked at by this very program. */
	if (argc == 2 && !strcmp(argv[1], "--version-number"))
		return version();
	while ((option = getopt(argc, argv, "s:")) != -1) {
		if (option != 's')
			return 2;
		stress_s = atof(optarg);
	}
	puts("TAP version 13");
	for (size_t set = 0; set < sizeof(all) / sizeof(all[0]); set++)
		for (const struct test *test = all[set]; test->name; test++) {
			if (!chosen(test->name, argc - optind, argv + optind))
				continue;
			double start = now_s();
			bool ok = passes(test);

			bad += !ok;
			printf("%s %d %s # %.1f s\n", ok ? "ok" : "not ok", ++number, test->name, now_s() - start);
		}
	printf("1..%d\n", number);
	return bad || !number;
}
