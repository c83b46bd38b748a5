// SPDX-License-Identifier: GPL-2.0
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

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

void on_processor(int number)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (number < 0 || i == number)
			CPU_SET(i, &set);
	CHECK(sched_setaffinity(0, sizeof(set), &set) == 0);
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
