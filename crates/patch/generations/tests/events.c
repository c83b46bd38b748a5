// SPDX-License-Identifier: GPL-2.0
/* A process that follows events of memory also gets those that happen through an overlay. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "generation.h"
#include "harness.h"

enum { PAGES = 16 };

static int descriptor;
static atomic_int protected_writes;

static char *beside_code(void)
{
	char *at = mmap(next_to_code(PAGES * PAGE), PAGES * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	CHECK(at != MAP_FAILED);
	return at;
}

static void open_userfaultfd(char *at, uint64_t mode)
{
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register where = {.range = {(uintptr_t)at, PAGES * PAGE}, .mode = mode};

	descriptor = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	CHECK(descriptor >= 0);
	CHECK(ioctl(descriptor, UFFDIO_API, &api) == 0);
	CHECK(ioctl(descriptor, UFFDIO_REGISTER, &where) == 0);
}

static void answer(const struct uffd_msg *message, char *page)
{
	uint64_t at = message->arg.pagefault.address & ~(PAGE - 1);

	if (message->arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
		struct uffdio_writeprotect lift = {.range = {at, PAGE}};

		protected_writes++;
		CHECK(ioctl(descriptor, UFFDIO_WRITEPROTECT, &lift) == 0);
	} else {
		struct uffdio_copy copy = {.dst = at, .src = (uintptr_t)page, .len = PAGE};

		memset(page, (int)(at / PAGE % 100 + 1), PAGE);
		CHECK(ioctl(descriptor, UFFDIO_COPY, &copy) == 0 || errno == EEXIST);
	}
}

static void *serve(void *unused)
{
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct pollfd ready = {descriptor, POLLIN, 0};

	(void)unused;
	CHECK(migrate(0) >= 0);
	for (;;) {
		struct uffd_msg message;

		CHECK(poll(&ready, 1, -1) == 1);
		if (read(descriptor, &message, sizeof(message)) == sizeof(message))
			answer(&message, page);
	}
}

static void missing_pages(void)
{
	pthread_t server;

	pin_program();
	long two = generation_of(2);
	char *at = beside_code();

	open_userfaultfd(at, UFFDIO_REGISTER_MODE_MISSING);
	CHECK(pthread_create(&server, NULL, serve, NULL) == 0);
	CHECK(migrate(two) == 0);
	for (unsigned long i = 0; i < PAGES; i++)
		CHECK(at[i * PAGE] == (char)(((uintptr_t)at / PAGE + i) % 100 + 1));
}

static void protected_pages(void)
{
	pthread_t server;

	pin_program();
	long two = generation_of(2);
	char *at = beside_code();

	CHECK(madvise(at, PAGES * PAGE, MADV_NOHUGEPAGE) == 0 && migrate(two) == 0);
	memset(at, 1, PAGES * PAGE);
	open_userfaultfd(at, UFFDIO_REGISTER_MODE_WP);
	CHECK(pthread_create(&server, NULL, serve, NULL) == 0);
	for (int round = 0; round < 3; round++) {
		struct uffdio_writeprotect protect = {.range = {(uintptr_t)at, PAGES * PAGE},
						      .mode = UFFDIO_WRITEPROTECT_MODE_WP};

		CHECK(ioctl(descriptor, UFFDIO_WRITEPROTECT, &protect) == 0);
		protected_writes = 0;
		for (unsigned long i = 0; i < PAGES; i += 2)
			at[i * PAGE] = (char)round;
		CHECK(protected_writes == PAGES / 2);
		for (unsigned long i = 0; i < PAGES; i += 2)
			CHECK(at[i * PAGE] == (char)round);
	}
}

static int soft_dirty(const char *at)
{
	uint64_t entry;
	int map = open("/proc/self/pagemap", O_RDONLY);

	CHECK(map >= 0 && pread(map, &entry, sizeof(entry), (off_t)((uintptr_t)at / PAGE * 8)) == 8);
	close(map);
	return entry >> 55 & 1;
}

static void dirty_bits(void)
{
	pin_program();
	long two = generation_of(2);
	char *at = beside_code();

	CHECK(migrate(two) == 0);
	memset(at, 1, PAGES * PAGE);
	for (int round = 0; round < 3; round++) {
		int clear = open("/proc/self/clear_refs", O_WRONLY);

		CHECK(clear >= 0 && write(clear, "4", 1) == 1);
		close(clear);
		for (unsigned long i = 0; i < PAGES; i++)
			CHECK(!soft_dirty(at + i * PAGE));
		for (unsigned long i = 0; i < PAGES; i += 3)
			at[i * PAGE] = (char)round;
		for (unsigned long i = 0; i < PAGES; i++)
			CHECK(soft_dirty(at + i * PAGE) == (i % 3 == 0));
	}
}

/* Equal pages become one, which a write splits again. */
static void merged(void)
{
	pin_program();
	long two = generation_of(2);
	char *at = beside_code();

	memset(at, 0x5a, PAGES * PAGE);
	CHECK(madvise(at, PAGES * PAGE, MADV_MERGEABLE) == 0 && migrate(two) == 0);
	for (int round = 0; round < 20; round++) {
		for (int i = 0; i < 50; i++)
			nap();
		for (unsigned long i = 0; i < PAGES; i += 7)
			at[i * PAGE] = (char)round;
		for (unsigned long i = 0; i < PAGES; i++)
			CHECK(at[i * PAGE] == (i % 7 ? 0x5a : (char)round));
	}
}

const struct test events_tests[] = {
	{"missing_pages", missing_pages, 60},
	{"protected_pages", protected_pages, 60},
	{"dirty_bits", dirty_bits, 60},
	{"merged", merged, 120},
	{0},
};
