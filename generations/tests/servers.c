// SPDX-License-Identifier: GPL-2.0
/* `stillpoint patch --view generation` on Debian's own redis, under load: a fix of Debian's, applied and taken back. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "tool.h"

#define PORT "6379"
#define ADDRESS "127.0.0.1:" PORT

static int connected(void)
{
	struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(atoi(PORT)),
				     .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(client >= 0);
	if (connect(client, (struct sockaddr *)&server, sizeof(server)) == 0)
		return client;
	close(client);
	return -1;
}

static int server(void)
{
	int client;

	AWAIT((client = connected()) >= 0);
	return client;
}

/* One line of what is answered. */
static const char *answer(const void *request, size_t length)
{
	static char line[512];
	size_t got = 0;
	int client = server();

	CHECK(write(client, request, length) == (ssize_t)length);
	while (got < sizeof(line) - 1 && !memchr(line, '\n', got)) {
		ssize_t now = read(client, line + got, sizeof(line) - 1 - got);

		CHECK(now > 0);
		got += (size_t)now;
	}
	close(client);
	line[got] = 0;
	return line;
}

/* As redis puts it at the end of a dump. */
static uint64_t crc64(const unsigned char *at, size_t length)
{
	uint64_t crc = 0;

	while (length--) {
		crc ^= *at++;
		for (int bit = 0; bit < 8; bit++)
			crc = crc & 1 ? crc >> 1 ^ 0x95ac9329ac4bc9b5ull : crc >> 1;
	}
	return crc;
}

/*
 * Whether the fix of CVE-2026-25243 is in force: it looks at a hash whose lengths can be read in two ways. Nothing is read
 * out of bounds either way (e2e/src/effects.rs).
 */
static bool is_fixed(void)
{
	static const char hash[] = "\x01\xfe\x05\0\0\0x\x07\0yz\x03\0abc\xff";
	static const char begin[] = "*4\r\n$7\r\nRESTORE\r\n$6\r\neffect\r\n$1\r\n0\r\n", clear[] = "DEL effect\r\n";
	unsigned char dump[64] = {9, sizeof(hash) - 1};
	size_t length = 2 + sizeof(hash) - 1;
	char request[256];

	memcpy(dump + 2, hash, sizeof(hash) - 1);
	dump[length++] = 9;
	dump[length++] = 0;
	uint64_t crc = crc64(dump, length);

	memcpy(dump + length, &crc, sizeof(crc));
	length += sizeof(crc);
	size_t at = (size_t)sprintf(request, "%s$%zu\r\n", begin, length);

	memcpy(request + at, dump, length);
	memcpy(request + at + length, "\r\n", 2);
	const char *said_now = answer(request, at + length + 2);
	bool fixed = strstr(said_now, "Bad data format");

	if (!fixed && strcmp(said_now, "+OK\r\n"))
		printf("# RESTORE: %s", said_now);
	CHECK(fixed || !strcmp(said_now, "+OK\r\n"));
	answer(clear, sizeof(clear) - 1);
	return fixed;
}

static void apply_all(void)
{
	ENDS(DONE, tool("apply", "--view", "generation", "--timeout", "120s", "/servers/1.patch", NULL));
	ENDS(DONE, tool("apply", "--view", "generation", "--timeout", "120s", "/servers/2.patch", NULL));
}

static void redis(void)
{
	int null = open("/dev/null", O_RDWR), status;

	CHECK(setenv("LD_LIBRARY_PATH", "/servers/lib", 1) == 0);
	snprintf(pid, sizeof(pid), "%d", start((char *[]){"/servers/redis-server", "--bind", "127.0.0.1", "--port", PORT, "--save",
							  "", "--appendonly", "no", NULL}, null, null));
	CHECK(unsetenv("LD_LIBRARY_PATH") == 0);
	CHECK(strstr(answer("PING\r\n", 6), "PONG") && !is_fixed());
	pid_t load = start((char *[]){"/stillpoint", "measure", "redis", "--addr", ADDRESS, "--mix", "get=75,set=20,lua=5",
				      "--connections", "20", "--rate", "200", "--idle", "20", "--blocking", "5", "--keys", "1000",
				      "--timeout", "60", "--duration", "3600", "--strict", NULL}, null, 1);

	for (int i = 0; i < 1000; i++)
		nap();
	for (int round = 0; round < 3; round++) {
		apply_all();
		CHECK(is_fixed());
		ENDS(DONE, tool("status", NULL));
		CHECK(strstr(said, "CVE-2026-25243"));
		ENDS(DONE, tool("revert", "--all", "--view", "generation", "--timeout", "120s", NULL));
		CHECK(!is_fixed());
		CHECK(waitpid(load, &status, WNOHANG) == 0);
	}
	/* what clients saw: with --strict one error is enough to fail */
	kill(load, SIGINT);
	CHECK(waitpid(load, &status, 0) == load && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

const struct test servers_tests[] = {
	{"redis", redis, 1200},
	{}
};
