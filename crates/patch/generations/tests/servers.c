// SPDX-License-Identifier: GPL-2.0
/* `stillpoint patch --view generation` on redis, memcached and MariaDB with quiescence points, under load, in each mode. */
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

#define PATCHES 99
/* Output of the load. */
#define TABLE "/load"

#define MODES 3
static char *const modes[MODES] = {"probe", "local", "global"};
/* Directory and port of the server under test. */
static const char *directory, *port;
static pid_t load;

static int connected(void)
{
	struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)),
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

/* Returns one line of the reply. */
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

/* Checksum in the form that redis appends to a dump. */
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
 * Returns true if the fix of CVE-2026-25243 is active: it checks a hash whose lengths can be read in two ways. Nothing is read out of
 * bounds in either case (crates/patch/tests/src/effects.rs).
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

static void start_server(char **words)
{
	int null = open("/dev/null", O_RDWR);

	snprintf(said, sizeof(said), "/%s/lib", directory);
	CHECK(setenv("LD_LIBRARY_PATH", said, 1) == 0);
	snprintf(pid, sizeof(pid), "%d", start(words, null, null));
	CHECK(unsetenv("LD_LIBRARY_PATH") == 0);
	close(null);
}

/* 20 active connections, 20 idle ones. */
static void start_load(char *mix)
{
	int null = open("/dev/null", O_RDWR), table = open(TABLE, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	char address[32];

	snprintf(address, sizeof(address), "127.0.0.1:%s", port);
	load = start((char *[]){"/stillpoint", "measure", (char *)directory, "--addr", address, "--mix", mix, "--connections", "20",
				"--rate", "200", "--idle", "20", "--keys", "1000", "--timeout", "60", "--duration", "3600",
				"--strict", NULL}, null, table);
	close(table);
	close(null);
	for (int i = 0; i < 1000; i++)
		nap();
}

/* Checks the clients' results: with --strict one error is enough to fail. */
static void end_load(void)
{
	char line[256];
	int status;

	kill(load, SIGINT);
	CHECK(waitpid(load, &status, 0) == load);
	for (FILE *table = fopen(TABLE, "r"); table && fgets(line, sizeof(line), table);)
		printf("# %s", line);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Applies all patches, in their order; returns their number. */
static int apply_all(char *mode)
{
	char patch[64];
	int count = 0;

	for (; count < PATCHES; count++) {
		snprintf(patch, sizeof(patch), "/%s/%02d.patch", directory, count + 1);
		if (access(patch, R_OK))
			break;
		ENDS(DONE, tool("apply", "--view", "generation", "--quiescence", mode, "--timeout", "120s", patch, NULL));
	}
	return count;
}

static void there_and_back(bool (*is_patched)(void), int rounds)
{
	int status;

	for (int i = 0; i < rounds * MODES; i++) {
		char *mode = modes[i % MODES];
		double began = now_s();
		int count = apply_all(mode);

		CHECK(count && is_patched());
		ENDS(DONE, tool("status", NULL));
		printf("# %d patches, %s: %.1f s\n", count, mode, now_s() - began);
		ENDS(DONE, tool("revert", "--all", "--view", "generation", "--quiescence", mode, "--timeout", "120s", NULL));
		CHECK(!is_patched());
		CHECK(waitpid(load, &status, WNOHANG) == 0);
	}
}

static void redis(void)
{
	directory = "redis";
	port = "6379";
	start_server((char *[]){"/redis/redis-server", "--bind", "127.0.0.1", "--port", (char *)port, "--save", "", "--appendonly",
				"no", NULL});
	CHECK(strstr(answer("PING\r\n", 6), "PONG") && !is_fixed());
	start_load("get=75,set=20,lua=5");
	there_and_back(is_fixed, 1);
	end_load();
}

static bool says_stillpoint(void)
{
	return strstr(answer("version\r\n", 9), "VERSION stillpoint");
}

static void memcached(void)
{
	directory = "memcached";
	port = "11211";
	start_server((char *[]){"/memcached/memcached", "-l", "127.0.0.1", "-p", (char *)port, "-u", "root", NULL});
	CHECK(!says_stillpoint());
	start_load("get=80,set=20");
	there_and_back(says_stillpoint, 3);
	end_load();
}

#define SYSBENCH "/mariadb/sysbench", "--db-driver=mysql", "--mysql-socket=/mariadb/socket", "--mysql-user=root", "--mysql-db=test"
#define READ_WRITE "--tables=1", "--table-size=1000", "/mariadb/oltp_read_write.lua"

static bool rand_is_half(void)
{
	ENDS(0, run((char *[]){SYSBENCH, "--threads=1", "--events=1", "/mariadb/rand.lua", "run", NULL}));
	CHECK(strstr(said, "RAND() is "));
	return strstr(said, "RAND() is 0.5\n");
}

/* Checks sysbench's line of each second: transactions continued, and no connection was lost. */
static void check_intervals(void)
{
	FILE *table = fopen(TABLE, "r");
	unsigned int second, seconds = 0;
	double rate, transactions = 0;
	char line[256];

	CHECK(table);
	while (fgets(line, sizeof(line), table)) {
		if (sscanf(line, "[ %us ] thds: 8 tps: %lf", &second, &rate) != 2)
			continue;
		CHECK(strstr(line, "reconn/s: 0.00"));
		seconds++;
		transactions += rate;
	}
	fclose(table);
	printf("# %.0f transactions in %u s\n", transactions, seconds);
	CHECK(transactions > 0);
}

static void mariadb_with(char *threads)
{
	int null = open("/dev/null", O_RDWR), table = open(TABLE, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), status;

	start_server((char *[]){"/mariadb/mariadbd", "--no-defaults", "--user=root", "--datadir=/mariadb/data",
				"--lc-messages-dir=/mariadb", "--socket=/mariadb/socket", "--skip-networking",
				"--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M", threads, NULL});
	CHECK(setenv("LD_LIBRARY_PATH", "/mariadb/lib", 1) == 0);
	AWAIT(run((char *[]){SYSBENCH, "--threads=1", "--events=1", "/mariadb/rand.lua", "run", NULL}) == 0);
	CHECK(!rand_is_half());
	ENDS(0, run((char *[]){SYSBENCH, READ_WRITE, "prepare", NULL}));
	load = start((char *[]){SYSBENCH, READ_WRITE, "--threads=8", "--rate=4", "--time=3600", "--report-interval=1", "run", NULL},
		     null, table);
	close(table);
	close(null);
	there_and_back(rand_is_half, 3);
	/* it must not have ended by itself: it only ends by itself after an error */
	CHECK(waitpid(load, &status, WNOHANG) == 0);
	kill(load, SIGKILL);
	CHECK(waitpid(load, &status, 0) == load);
	check_intervals();
	ENDS(0, run((char *[]){SYSBENCH, READ_WRITE, "cleanup", NULL}));
	CHECK(unsetenv("LD_LIBRARY_PATH") == 0);
	kill(atoi(pid), SIGTERM);
	CHECK(waitpid(atoi(pid), &status, 0) == atoi(pid) && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void mariadb(void)
{
	directory = "mariadb";
	/* the directory in which scripts find each other */
	CHECK(chdir("/mariadb") == 0);
	mariadb_with("--thread-handling=one-thread-per-connection");
	mariadb_with("--thread-handling=pool-of-threads");
}

const struct test servers_tests[] = {
	{"redis", redis, 1800},
	{"memcached", memcached, 1800},
	{"mariadb", mariadb, 3000},
	{}
};
