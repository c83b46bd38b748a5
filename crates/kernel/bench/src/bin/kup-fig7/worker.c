// A program with much memory, for measurements: it writes to half of it all the time, at a fixed rate, and every
// request (a datagram) reads a page of it.
//   worker serve MIB RATE [N]   writes to RATE MiB of pages a second
//   worker probe FILE [N]       requests all the time; the times of the answers before and after the longest silence
//   worker load SECONDS [N]     as many requests as it gets answers to
//   worker now                  the clock that all of them read, in microseconds
// N distinguishes workers of one machine; 0 if it is not given.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 7070, PAGE = 4096, TICK_US = 10000 };

static uint64_t *memory;
static uint64_t pages, rate;
static int number;

static uint64_t now_us(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000ull + at.tv_nsec / 1000;
}

static uint64_t *page(uint64_t n) { return memory + n * (PAGE / sizeof *memory); }

// Walks over the first half, one word of each page. It keeps its own time: it does not catch up for the time in which
// it was stopped.
static void *writes(void *nothing) {
    uint64_t at = 0, step = rate * 256 * TICK_US / 1000000;
    for (;;) {
        for (uint64_t n = 0; n < step; n++, at++) page(at % (pages / 2))[1] += 1;
        usleep(TICK_US);
    }
    return nothing;
}

static struct sockaddr_in address(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(PORT + number)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
}

static int serve(void) {
    pages = pages * 256;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return perror("mmap"), 1;
    // no page is equal to another one, and none holds only zeros
    for (uint64_t n = 0; n < pages; n++)
        for (uint64_t word = 0; word < PAGE / sizeof *memory; word++) page(n)[word] = n * 0x9e3779b97f4a7c15ull + word;
    struct sockaddr_in at = address(), from;
    int door = socket(AF_INET, SOCK_STREAM, 0), yes = 1, udp = socket(AF_INET, SOCK_DGRAM, 0);
    setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    // a unit that goes along in a switch has a TCP port
    if (bind(door, (void *)&at, sizeof at) || listen(door, 4) || bind(udp, (void *)&at, sizeof at)) return perror("bind"), 1;
    pthread_t thread;
    if (rate && pthread_create(&thread, NULL, writes, NULL)) return 1;
    for (;;) {
        uint64_t asked;
        socklen_t length = sizeof from;
        if (recvfrom(udp, &asked, sizeof asked, 0, (void *)&from, &length) != sizeof asked) continue;
        // the answer is the request and the first word of a page of the memory
        uint64_t n = asked * 0x9e3779b97f4a7c15ull % pages, answer[2] = {asked, page(n)[0] - n * 0x9e3779b97f4a7c15ull};
        sendto(udp, answer, sizeof answer, 0, (void *)&from, length);
    }
}

static int ask(int udp, uint64_t question, int patience_ms) {
    uint64_t answer[2];
    struct pollfd wait = {.fd = udp, .events = POLLIN};
    if (send(udp, &question, sizeof question, 0) != sizeof question) return usleep(500), 0;
    while (poll(&wait, 1, patience_ms) > 0) {
        if (recv(udp, answer, sizeof answer, 0) != sizeof answer) return usleep(500), 0;
        // an answer to an earlier request also shows that the worker serves
        if (answer[0] > question) continue;
        if (answer[1] != 0) fprintf(stderr, "a page is not what it was\n"), exit(9);
        return 1;
    }
    return 0;
}

static int client(void) {
    struct sockaddr_in at = address();
    int udp = socket(AF_INET, SOCK_DGRAM, 0);
    return connect(udp, (void *)&at, sizeof at) ? -1 : udp;
}

static volatile sig_atomic_t ended;
static void end(int signal) { ended = signal; }

static int probe(const char *path) {
    uint64_t question = now_us(), last = 0, before = 0, after = 0;
    int udp = client();
    struct sigaction act = {.sa_handler = end};
    sigaction(SIGTERM, &act, NULL);
    while (!ended) {
        if (!ask(udp, ++question, 20)) continue;
        uint64_t at = now_us();
        if (last && at - last > after - before) before = last, after = at;
        last = at;
        usleep(1000);
    }
    FILE *file = fopen(path, "w");
    return !file || fprintf(file, "%llu %llu\n", (unsigned long long)before, (unsigned long long)after) < 0 || fclose(file);
}

static int load(double seconds) {
    int udp = client();
    uint64_t question = now_us(), answers = 0, begun = now_us();
    while (now_us() - begun < seconds * 1e6) answers += ask(udp, ++question, 1000);
    printf("%.0f\n", answers / ((now_us() - begun) / 1e6));
    return 0;
}

int main(int count, char **words) {
    int needed = count > 1 && !strcmp(words[1], "serve") ? 4 : 3;
    if (count == 2 && !strcmp(words[1], "now")) return printf("%llu\n", (unsigned long long)now_us()), 0;
    if (count != needed && count != needed + 1) return 2;
    if (count > needed) number = atoi(words[needed]);
    if (!strcmp(words[1], "serve")) return pages = atoll(words[2]), rate = atoll(words[3]), serve();
    if (!strcmp(words[1], "probe")) return probe(words[2]);
    if (!strcmp(words[1], "load")) return load(atof(words[2]));
    return 2;
}
