// SPDX-License-Identifier: GPL-2.0
/* Control groups account for pages of generations: the group of the writer is charged until they are freed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

#define NR_MSEAL 462
#define GROUPS "/sys/fs/cgroup"
#define MIB (1l << 20)
#define LENGTH (8 * MIB)
/* Tolerance for charges that each CPU keeps in reserve, and for other memory of a process. */
#define SLACK (2 * MIB)

static void put(const char *group, const char *file, const char *text)
{
	char path[128];

	snprintf(path, sizeof(path), GROUPS "/%s/%s", group, file);
	int to = open(path, O_WRONLY);

	CHECK(to >= 0 && write(to, text, strlen(text)) == (ssize_t)strlen(text));
	close(to);
}

static long charged(const char *group)
{
	char path[128], text[32] = "";

	snprintf(path, sizeof(path), GROUPS "/%s/memory.current", group);
	int from = open(path, O_RDONLY);

	CHECK(from >= 0 && read(from, text, sizeof(text) - 1) > 0);
	close(from);
	return atol(text);
}

static void groups(void)
{
	CHECK(mount("cgroup2", GROUPS, "cgroup2", 0, NULL) == 0 || errno == EBUSY);
	put("", "cgroup.subtree_control", "+memory");
	CHECK(mkdir(GROUPS "/one", 0755) == 0 || errno == EEXIST);
	CHECK(mkdir(GROUPS "/two", 0755) == 0 || errno == EEXIST);
}

static char *sealed_range(void)
{
	char *at = mmap(NULL, LENGTH, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(at != MAP_FAILED && syscall(NR_MSEAL, at, LENGTH, 0) == 0 && pin(at, LENGTH) == 0);
	return at;
}

static long write_all(long generation, const char *at)
{
	for (long i = 0; i < LENGTH; i += (long)PAGE)
		if (write_to(generation, at + i, "x", 1))
			return -1;
	return 0;
}

/* Memory is freed a moment later. */
static void uncharged(const char *group, long before)
{
	AWAIT(charged(group) < before + SLACK);
}

static void charged_to_writer(void)
{
	groups();
	put("one", "cgroup.procs", "0");
	char *at = sealed_range();
	long generation = create(0), one = charged("one"), two = charged("two");

	CHECK(generation > 0 && write_all(generation, at) == 0);
	CHECK(charged("one") >= one + LENGTH && charged("one") < one + LENGTH + SLACK);
	/* another generation has the same pages, and only its own tables */
	long like = create(generation);

	CHECK(like > 0 && charged("one") < one + LENGTH + SLACK);
	put("two", "cgroup.procs", "0");
	CHECK(write_all(like, at) == 0);
	CHECK(charged("two") >= two + LENGTH && charged("two") < two + LENGTH + SLACK);
	CHECK(charged("one") < one + LENGTH + SLACK);
	CHECK(delete(generation) == 0);
	uncharged("one", one);
	/* pages that are written again replace others */
	CHECK(write_all(like, at) == 0 && charged("two") < two + LENGTH + SLACK);
	/* a child shares them, and they are freed with the last process */
	CHECK(migrate(like) == 0);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child)
		_exit(*at != 'x' || charged("two") >= two + LENGTH + 2 * SLACK);
	CHECK(child_succeeds(child) && charged("two") >= two + LENGTH);
	CHECK(delete(like) == 0 && *at == 'x' && migrate(0) == like && *at == 0);
	uncharged("two", two);
	put("", "cgroup.procs", "0");
}

/* A process that writes more than the group's limit is terminated by that limit, and nothing is left. */
static void limited(void)
{
	int status;

	groups();
	put("one", "memory.max", "4194304");
	put("one", "memory.swap.max", "0");
	long before = charged("one");
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		put("one", "cgroup.procs", "0");
		char *at = sealed_range();

		_exit(write_all(create(0), at) == 0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
	uncharged("one", before);
	put("one", "memory.max", "max");
}

const struct test groups_tests[] = {
	{"charged_to_writer", charged_to_writer, 60},
	{"limited", limited, 60},
	{0},
};
