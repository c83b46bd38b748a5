// SPDX-License-Identifier: GPL-2.0
/* Debuggers read and change the memory that the traced thread sees. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

static atomic_int ready;
static atomic_int *seen;

static void *inside(void *argument)
{
	CHECK(migrate((long)argument) == 0);
	seen[0] = (int)syscall(SYS_gettid);
	ready = 1;
	for (;;)
		seen[2] = version();
}

/* A process with one thread in the base and another one in a generation. */
static pid_t start(void)
{
	pid_t child;

	seen = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(seen != MAP_FAILED);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		pthread_t thread;

		pin_program();
		CHECK(pthread_create(&thread, NULL, inside, (void *)generation_of(2)) == 0);
		AWAIT(ready);
		for (;;)
			seen[1] = version();
	}
	AWAIT(seen[2] && seen[1]);
	return child;
}

static void attach(pid_t thread)
{
	CHECK(ptrace(PTRACE_ATTACH, thread, NULL, NULL) == 0);
	CHECK(waitpid(thread, NULL, __WALL) == thread);
}

static int peek(pid_t thread)
{
	errno = 0;
	long word = ptrace(PTRACE_PEEKTEXT, thread, version_byte(), NULL);

	CHECK(errno == 0);
	return (int)word;
}

static void poke(pid_t thread, int number)
{
	errno = 0;
	long word = ptrace(PTRACE_PEEKTEXT, thread, version_byte(), NULL);

	CHECK(errno == 0);
	word = (word & ~0xffffffffl) | number;
	CHECK(ptrace(PTRACE_POKETEXT, thread, version_byte(), word) == 0);
}

static void end(pid_t child)
{
	kill(child, SIGKILL);
	CHECK(waitpid(child, NULL, 0) == child);
}

static void traced(void)
{
	pid_t child = start(), thread = seen[0];

	attach(child);
	attach(thread);
	CHECK(peek(child) == 1 && peek(thread) == 2);
	poke(thread, 5);
	CHECK(peek(child) == 1 && peek(thread) == 5);
	poke(child, 6);
	CHECK(peek(child) == 6 && peek(thread) == 5);
	CHECK(ptrace(PTRACE_DETACH, thread, NULL, NULL) == 0);
	CHECK(ptrace(PTRACE_DETACH, child, NULL, NULL) == 0);
	AWAIT(seen[1] == 6 && seen[2] == 5);
	end(child);
}

static int open_of(pid_t process, pid_t thread, const char *name, int flags)
{
	char path[96];

	snprintf(path, sizeof(path), "/proc/%d/task/%d/%s", process, thread, name);
	return open(path, flags);
}

static void memory_files(void)
{
	pid_t child = start(), thread = seen[0];
	int base = open_of(child, child, "mem", O_RDWR), other = open_of(child, thread, "mem", O_RDWR);
	off_t at = (off_t)(uintptr_t)version_byte();
	int number = 0, nine = 9;
	char across[2 * PAGE];

	CHECK(base >= 0 && other >= 0);
	CHECK(pread(base, &number, 4, at) == 4 && number == 1);
	CHECK(pread(other, &number, 4, at) == 4 && number == 2);
	CHECK(pread(other, across, sizeof(across), at - (off_t)PAGE) == sizeof(across));
	memcpy(&number, across + PAGE, 4);
	CHECK(number == 2);
	/* From 7.2 on only its debugger may write memory that a thread itself may not write. */
	attach(thread);
	CHECK(pwrite(other, &nine, 4, at) == 4);
	CHECK(ptrace(PTRACE_DETACH, thread, NULL, NULL) == 0);
	AWAIT(seen[2] == 9);
	CHECK(pread(base, &number, 4, at) == 4 && number == 1 && seen[1] == 1);
	end(child);
}

static void listed(void)
{
	pid_t child = start(), thread = seen[0];
	char text[512] = "";
	int file = open_of(child, thread, "generation", O_RDONLY), id = 0, threads = 0;
	unsigned long pages = 0;
	unsigned int tables = 0;
	char state[16];

	CHECK(file >= 0 && read(file, text, sizeof(text) - 1) > 0 && atoi(text) > 0);
	file = open_of(child, child, "generation", O_RDONLY);
	CHECK(file >= 0 && read(file, text, sizeof(text) - 1) > 0 && !strcmp(text, "0\n"));
	snprintf(text, sizeof(text), "/proc/%d/generations", child);
	file = open(text, O_RDONLY);
	memset(text, 0, sizeof(text));
	CHECK(file >= 0 && read(file, text, sizeof(text) - 1) > 0);
	char *line = strchr(text, '\n');

	CHECK(line && sscanf(line, "%d %15s %d %lu %u", &id, state, &threads, &pages, &tables) == 5);
	CHECK(!strcmp(state, "known") && threads == 1 && pages == 1 && tables >= 3);
	end(child);
}

static atomic_int over;

static void *spin(void *unused)
{
	while (!over)
		;
	return unused;
}

static void *end_at_once(void *unused)
{
	return unused;
}

static void *bear(void *unused)
{
	pthread_t child;

	while (!over) {
		CHECK(pthread_create(&child, NULL, end_at_once, NULL) == 0);
		CHECK(pthread_join(child, NULL) == 0);
	}
	return unused;
}

/* A thread that ends is in the generation until it is no longer visible, even if it waits long for a processor. */
static void listed_ending(void)
{
	pthread_t others[5];
	struct dirent *entry;
	char path[300], text[16];
	double until = now_s() + 5;

	pin_program();
	long generation = generation_of(2);

	CHECK(migrate(generation) == 0);
	for (int i = 0; i < 5; i++)
		CHECK(pthread_create(&others[i], NULL, i < 3 ? spin : bear, NULL) == 0);
	while (now_s() < until) {
		DIR *threads = opendir("/proc/self/task");

		CHECK(threads);
		while ((entry = readdir(threads))) {
			snprintf(path, sizeof(path), "/proc/self/task/%s/generation", entry->d_name);
			int file = open(path, O_RDONLY);

			if (file < 0)
				continue;
			if (read(file, text, sizeof(text)) > 0)
				CHECK(atol(text) == generation);
			close(file);
		}
		closedir(threads);
	}
	over = 1;
	for (int i = 0; i < 5; i++)
		CHECK(pthread_join(others[i], NULL) == 0);
}

const struct test debugger_tests[] = {
	{"traced", traced, 60},
	{"memory_files", memory_files, 60},
	{"listed", listed, 60},
	{"listed_ending", listed_ending, 120},
	{0},
};
