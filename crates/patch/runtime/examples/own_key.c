/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * own_key.c - a key that one thread can read, and no other thread of the same process
 *
 * A use besides patching that section 5 of WfPatch (OSDI'20) proposes. The page with the key has zeros in view 0; one view
 * has the key, and only the signer enters it. A flaw in another thread that reads any memory of the process reads zeros.
 * The kernel does not wipe the page when the view ends.
 * Needs a kernel with address-space generations. Exits with 0 if only the signer read the key, with 2 if the kernel does not
 * support it.
 *
 *   cc -O2 own_key.c -lstillpoint -pthread -o own_key
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <stillpoint_view.h>

enum { PAGE = 4096, KEY = 32, SNOOPS = 3, MESSAGES = 10000 };

static volatile const unsigned char *page;
static int with_key;
static atomic_int signing = 1;
static atomic_long signatures, zeros, keys;

static void must(int result, const char *what)
{
    if (result >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror(-result));
    exit(result == -ENOSYS ? 2 : 1);
}

static int is_zero(void)
{
    unsigned sum = 0;
    for (int i = 0; i < KEY; i++)
        sum |= page[i];
    return sum == 0;
}

/* Computes no real signature: it only has to read the key. */
static void *signer(void *unused)
{
    (void)unused;
    must(sp_view_enter(with_key), "enter");
    for (long message = 0; message < MESSAGES; message++) {
        unsigned long sum = (unsigned long)message;
        for (int i = 0; i < KEY; i++)
            sum = sum * 31 + page[i];
        signatures += !is_zero() && sum != 0;
    }
    must(sp_view_enter(0), "leave");
    signing = 0;
    return NULL;
}

/* Searches for the key at its address, directly and through the kernel. */
static void *snoop(void *unused)
{
    unsigned char copy[KEY];
    int ends[2];
    (void)unused;
    if (pipe(ends))
        return NULL;
    do {
        *(is_zero() ? &zeros : &keys) += 1;
        if (write(ends[1], (const void *)page, KEY) == KEY && read(ends[0], copy, KEY) == KEY)
            for (int i = 0; i < KEY; i++)
                keys += copy[i] != 0;
        struct iovec here = {copy, KEY}, there = {(void *)page, KEY};
        if (process_vm_readv(getpid(), &here, 1, &there, 1, 0) == KEY)
            for (int i = 0; i < KEY; i++)
                keys += copy[i] != 0;
    } while (signing);
    return NULL;
}

int main(void)
{
    pthread_t threads[SNOOPS + 1];
    unsigned char key[KEY];
    void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || getrandom(key, KEY, 0) != KEY)
        return 1;
    memset(at, 0, PAGE);
    page = at;
    must(sp_view_pin(at, PAGE), "pin");
    with_key = sp_view_create(0);
    must(with_key, "create");
    must(sp_view_write(with_key, at, key, KEY), "write");
    explicit_bzero(key, KEY);
    for (int i = 0; i < SNOOPS; i++)
        pthread_create(&threads[i], NULL, snoop, NULL);
    pthread_create(&threads[SNOOPS], NULL, signer, NULL);
    for (int i = 0; i <= SNOOPS; i++)
        pthread_join(threads[i], NULL);
    must(sp_view_delete(with_key), "delete");
    printf("%ld of %d messages signed; others looked %ld times and saw %ld bytes of the key\n", (long)signatures, MESSAGES,
           (long)zeros, (long)keys);
    return signatures == MESSAGES && zeros > 0 && keys == 0 ? 0 : 1;
}
