/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * hash_server.c - a server with quiescence points, and with a mistake that is patched while it runs
 *
 * The case study of "Wait-Free Code Patching of Multi-Threaded Processes" (PLOS'19, section 3): a thread for each
 * connection; a request is 16 bytes, which are hashed repeatedly with MD5 until a hash begins with so many zero bits;
 * the answer is the hash before and that hash. The comparison is wrong by one: see hash_server.diff.
 *
 *   cc -O2 hash_server.c -lstillpoint -pthread -o hash_server
 *   hash_server PORT [BITS]          (PORT 0: any, printed)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stillpoint.h>

/* Roles: the thread that accepts connections blocks last, as it creates the others. */
enum { WORKING, LISTENING, PRIORITIES };

struct hash {
    uint8_t bytes[16];
};

struct answer {
    struct hash before, hash;
};

static unsigned bits = 16;

/* --- MD5 of 16 bytes (RFC 1321): one block ------------------------------------------------------------------------ */

static uint32_t rotate(uint32_t x, unsigned by)
{
    return x << by | x >> (32 - by);
}

/* floor(2^32 * |sin(i + 1)|) */
static const uint32_t SINES[64] = {
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
    0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
    0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
    0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
    0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
};

static struct hash md5(const struct hash *of)
{
    static const unsigned char turns[4][4] = {{7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}};
    static const uint32_t start[4] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};
    /* the message, its end, and its length in bits */
    uint32_t block[16] = {[4] = 0x80, [14] = 128};
    memcpy(block, of->bytes, sizeof of->bytes);
    uint32_t a = start[0], b = start[1], c = start[2], d = start[3];
    for (unsigned i = 0; i < 64; i++) {
        uint32_t mixed, word;
        switch (i / 16) {
        case 0:
            mixed = (b & c) | (~b & d), word = i;
            break;
        case 1:
            mixed = (d & b) | (~d & c), word = (5 * i + 1) % 16;
            break;
        case 2:
            mixed = b ^ c ^ d, word = (3 * i + 5) % 16;
            break;
        default:
            mixed = c ^ (b | ~d), word = 7 * i % 16;
        }
        uint32_t next = b + rotate(a + mixed + SINES[i] + block[word], turns[i / 16][i % 4]);
        a = d, d = c, c = b, b = next;
    }
    uint32_t sums[4] = {start[0] + a, start[1] + b, start[2] + c, start[3] + d};
    struct hash hash;
    memcpy(hash.bytes, sums, sizeof sums);
    return hash;
}

/* --- The server --------------------------------------------------------------------------------------------------- */

static unsigned zero_bits(const struct hash *hash)
{
    unsigned count = 0;
    while (count < 128 && !(hash->bytes[count / 8] >> (7 - count % 8) & 1))
        count++;
    return count;
}

/* Answers one request. Not inlined: a worker never leaves its own loop, and would always have old code on its stack. */
__attribute__((noinline)) static void handle_event(const struct hash *request, struct answer *answer)
{
    answer->hash = *request;
    do {
        answer->before = answer->hash;
        answer->hash = md5(&answer->before);
    } while (zero_bits(&answer->hash) <= bits);
}

static int all(int connection, void *data, size_t len, int sending)
{
    for (size_t done = 0; done < len;) {
        char *at = (char *)data + done;
        ssize_t now = sending ? send(connection, at, len - done, MSG_NOSIGNAL) : recv(connection, at, len - done, 0);
        if (now <= 0)
            return 0;
        done += (size_t)now;
    }
    return 1;
}

static void *serve(void *argument)
{
    int connection = (int)(intptr_t)argument;
    struct hash request;
    struct answer answer;
    sp_thread_birth_group("worker", "workers");
    for (;;) {
        /* between two requests: no state of the last one is left */
        sp_quiescence_point();
        sp_park_begin();
        int asked = all(connection, &request, sizeof request, 0);
        sp_park_end();
        if (!asked)
            break;
        handle_event(&request, &answer);
        if (!all(connection, &answer, sizeof answer, 1))
            break;
    }
    close(connection);
    sp_thread_death();
    return NULL;
}

static int listening(uint16_t port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) ||
        bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 128) ||
        getsockname(fd, (struct sockaddr *)&address, &len)) {
        perror("listen");
        exit(1);
    }
    printf("listening on port %u\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    if (argc > 2)
        bits = (unsigned)atoi(argv[2]);
    struct sp_config config = {.size = sizeof config, .priorities = PRIORITIES};
    int error = sp_init(&config);
    if (error) {
        fprintf(stderr, "sp_init: %s\n", strerror(-error));
        return 1;
    }
    int listener = listening((uint16_t)atoi(argv[1])), one = 1;
    sp_thread_birth("listener");
    sp_set_priority(LISTENING);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (;;) {
        pthread_t thread;
        sp_quiescence_point();
        sp_park_begin();
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        sp_park_end();
        if (connection < 0)
            continue;
        setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (pthread_create(&thread, &detached, serve, (void *)(intptr_t)connection))
            close(connection);
    }
}
