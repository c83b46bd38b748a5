// SPDX-License-Identifier: GPL-2.0
/*
 * The first process of the machine that the tests run in: mounts, swap in compressed memory, the tests (the part of the kernel command
 * line after `-- run`), the end.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static void put(const char *path, const char *text)
{
	int file = open(path, O_WRONLY);

	if (file < 0 || write(file, text, strlen(text)) != (ssize_t)strlen(text))
		printf("# init: %s cannot be written\n", path);
	close(file);
}

/* Writes the same header as mkswap(8). */
static void swap_on(const char *device, unsigned int pages)
{
	char head[4096] = "";
	uint32_t version = 1, last = pages - 1;
	int file = open(device, O_WRONLY);

	memcpy(head + 1024, &version, 4);
	memcpy(head + 1028, &last, 4);
	memcpy(head + 4086, "SWAPSPACE2", 10);
	if (file < 0 || write(file, head, sizeof(head)) != sizeof(head) || fsync(file) || swapon(device, 0))
		printf("# init: no swap on %s\n", device);
	close(file);
}

/* Servers and their clients need the loopback interface. */
static void network_on(void)
{
	struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	int any = socket(AF_INET, SOCK_DGRAM, 0);

	if (any < 0 || ioctl(any, SIOCSIFFLAGS, &loopback))
		printf("# init: no network\n");
	close(any);
}

static int run(char **arguments)
{
	int status;
	pid_t child = fork();

	if (!child) {
		execv(arguments[0], arguments);
		_exit(127);
	}
	while (waitpid(child, &status, 0) != child)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

int main(int argc, char **argv)
{
	/* The kernel passes the unknown parts of its command line, and then the part for the tests. */
	while (argc > 2 && strcmp(*argv, "run")) {
		argv++;
		argc--;
	}
	argv++;
	mkdir("/proc", 0755);
	mkdir("/sys", 0755);
	mkdir("/dev", 0755);
	mount("proc", "/proc", "proc", 0, NULL);
	mount("sysfs", "/sys", "sysfs", 0, NULL);
	mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	put("/sys/block/zram0/disksize", "134217728");
	swap_on("/dev/zram0", 32768);
	network_on();
	put("/sys/kernel/mm/ksm/sleep_millisecs", "20");
	put("/sys/kernel/mm/ksm/run", "1");
	printf("# init: result %d\n", run(argv));
	/* The kernel does not wait for its last messages. */
	tcdrain(STDOUT_FILENO);
	sync();
	reboot(RB_AUTOBOOT);
	return 1;
}
