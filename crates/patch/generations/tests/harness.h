/* SPDX-License-Identifier: GPL-2.0 */
/* Tests in the form of the kernel's selftests: each in a process of its own, results by TAP. */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdbool.h>

struct test {
	const char *name;
	void (*run)(void);
	unsigned int limit_s;
};

/* Terminates the test's process. */
_Noreturn void failed(const char *file, int line, const char *what);
#define CHECK(condition) ((condition) ? (void)0 : failed(__FILE__, __LINE__, #condition))

/* Returns true if an access to the byte ends in SIGSEGV. */
bool faults(const volatile char *at);
/* Runs a function in a thread. */
void in_thread(void (*run)(void *), void *argument);
/* Binds the calling thread to a processor; -1: to none. */
void on_processor(int number);
/* Waits until the condition is true. */
#define AWAIT(condition) do { while (!(condition)) nap(); } while (0)
void nap(void);
bool child_succeeds(int child);
double now_s(void);

/* True if the options claim that the processor has PCID, or INVLPGB. */
extern bool processor_has_contexts, processor_broadcasts;
/* Gives this process a TLB context that all processors have in common. */
void take_global_context(void);

/* The last test of each array has no name. */
extern const struct test basic_tests[], life_tests[], memory_tests[], huge_tests[], events_tests[], debugger_tests[],
	lookups_tests[], probes_tests[], groups_tests[], user_tests[], contexts_tests[], global_tests[], patching_tests[],
	points_tests[], servers_tests[], stress_tests[], absent_tests[], refused_tests[];

#endif
