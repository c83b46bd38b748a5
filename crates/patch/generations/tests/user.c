// SPDX-License-Identifier: GPL-2.0
/* The example of libstillpoint's views, and the answers of a kernel without generations. */
#include <errno.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

static void own_key(void)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		execl("/own_key", "/own_key", NULL);
		_exit(127);
	}
	CHECK(child_succeeds(child));
}

static void absent(void)
{
	struct asgen_status status;

	CHECK(asgen(ASGEN_STATUS, 0, &status, sizeof(status)) == -1 && errno == ENOSYS);
	CHECK(asgen(ASGEN_CREATE, 0, NULL, 0) == -1 && errno == ENOSYS);
	CHECK(access("/proc/thread-self/generation", F_OK) == -1);
}

const struct test user_tests[] = {
	{"own_key", own_key, 120},
	{}
};

const struct test absent_tests[] = {
	{"absent", absent, 120},
	{}
};
