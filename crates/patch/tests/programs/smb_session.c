/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * smb_session.c - one session of a file server that works with files until its input ends
 *
 * usage: smb_session URL NAME RATE. Each request is due at a fixed time, whether the one before was answered in time or
 * not. It prints a line for each right answer; at the first other one it prints what failed, and ends with 1. A file
 * stays open all the time: a connection that was lost, and made again by the library, does not have it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* libsmbclient */
struct smbc_dirent {
    unsigned int smbc_type, dirlen, commentlen;
    char *comment;
    unsigned int namelen;
    char name[1];
};
typedef void (*auth_fn)(const char *, const char *, char *, int, char *, int, char *, int);
int smbc_init(auth_fn, int);
int smbc_open(const char *, int, mode_t);
ssize_t smbc_read(int, void *, size_t);
ssize_t smbc_write(int, const void *, size_t);
off_t smbc_lseek(int, off_t, int);
int smbc_close(int);
int smbc_stat(const char *, struct stat *);
int smbc_rename(const char *, const char *);
int smbc_unlink(const char *);
int smbc_opendir(const char *);
struct smbc_dirent *smbc_readdir(unsigned int);
int smbc_closedir(int);

enum { SIZE = 96 << 10 };

static char url[256], first[512], second[512];
static const char *own;
static unsigned char wanted[SIZE], got[SIZE];
static unsigned round_number;

static void credentials(const char *server, const char *share, char *group, int group_size, char *user, int user_size,
                        char *word, int word_size)
{
    (void)server, (void)share, (void)group, (void)group_size, (void)word, (void)word_size;
    snprintf(user, user_size, "guest");
}

static void fill(void)
{
    for (size_t i = 0; i < SIZE; i++)
        wanted[i] = (unsigned char)(i * 31 + (i >> 8) + round_number * 7);
}

static int is_read_back(int file)
{
    memset(got, 0, SIZE);
    for (size_t done = 0; done < SIZE;) {
        ssize_t count = smbc_read(file, got + done, SIZE - done);
        if (count <= 0)
            return 0;
        done += count;
    }
    return memcmp(got, wanted, SIZE) == 0;
}

static int write_file(const char *path)
{
    int file = smbc_open(path, O_CREAT | O_TRUNC | O_RDWR, 0644);
    if (file < 0)
        return 0;
    for (size_t done = 0; done < SIZE;) {
        ssize_t count = smbc_write(file, wanted + done, SIZE - done);
        if (count <= 0)
            return 0;
        done += count;
    }
    return smbc_close(file) == 0;
}

static int read_file(const char *path)
{
    int file = smbc_open(path, O_RDONLY, 0);
    return file >= 0 && is_read_back(file) && smbc_close(file) == 0;
}

static int has_size(const char *path)
{
    struct stat found;
    return smbc_stat(path, &found) == 0 && found.st_size == SIZE;
}

static int is_listed(void)
{
    int directory = smbc_opendir(url), listed = 0;
    struct smbc_dirent *entry;
    if (directory < 0)
        return 0;
    while ((entry = smbc_readdir(directory)))
        listed |= strcmp(entry->name, own) == 0;
    return smbc_closedir(directory) == 0 && listed;
}

/* Writes other bytes into the file that stays open, and reads them. */
static int held_file(int held)
{
    if (smbc_lseek(held, 0, SEEK_SET) != 0 || smbc_write(held, wanted, SIZE) != SIZE)
        return 0;
    return smbc_lseek(held, 0, SEEK_SET) == 0 && is_read_back(held);
}

static int request(unsigned kind, int held)
{
    switch (kind) {
    case 0: return write_file(first);
    case 1: return held_file(held);
    case 2: return read_file(first);
    case 3: return has_size(first);
    case 4: return smbc_rename(first, second) == 0;
    case 5: return is_listed();
    case 6: return read_file(second);
    default: return smbc_unlink(second) == 0;
    }
}

static int is_over(void)
{
    struct pollfd input = {.fd = 0, .events = POLLIN};
    return poll(&input, 1, 0) == 1;
}

int main(int argc, char **argv)
{
    static const char *const kinds[] = {"write", "held file", "read", "stat", "rename", "list", "read again", "unlink"};
    char held_path[512], own_name[128];
    struct timespec due;
    long interval_ns;
    int held;

    if (argc != 4 || (interval_ns = (long)(1e9 / atof(argv[3]))) <= 0)
        return 2;
    snprintf(url, sizeof(url), "%s", argv[1]);
    snprintf(first, sizeof(first), "%s/%s-first", url, argv[2]);
    snprintf(second, sizeof(second), "%s/%s-second", url, argv[2]);
    snprintf(held_path, sizeof(held_path), "%s/%s-held", url, argv[2]);
    snprintf(own_name, sizeof(own_name), "%s-second", argv[2]);
    own = own_name;
    fill();
    if (smbc_init(credentials, 0) != 0 || !write_file(held_path) || (held = smbc_open(held_path, O_RDWR, 0)) < 0) {
        printf("failed: connect: %s\n", strerror(errno));
        return 1;
    }
    clock_gettime(CLOCK_MONOTONIC, &due);
    for (unsigned kind = 0; !is_over(); kind = (kind + 1) % 8) {
        if (kind == 0) {
            round_number++;
            fill();
        }
        if (!request(kind, held)) {
            printf("failed: %s: %s\n", kinds[kind], strerror(errno));
            return 1;
        }
        printf("%s\n", kinds[kind]);
        fflush(stdout);
        due.tv_sec += (due.tv_nsec + interval_ns) / 1000000000;
        due.tv_nsec = (due.tv_nsec + interval_ns) % 1000000000;
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
    }
    return smbc_close(held) == 0 ? 0 : 1;
}
