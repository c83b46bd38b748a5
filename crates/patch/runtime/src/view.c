/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _GNU_SOURCE
#include <stillpoint_view.h>

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* asgen(2) */
#define NR_ASGEN 548
#define NR_MSEAL 462
enum { REGISTER, PIN, CREATE, WRITE, MIGRATE, COMMIT, DELETE };

static int call(int op, int view, void *argument, size_t size)
{
    /* another kernel may use the number for another call */
    if (!sp_view_supported())
        return -ENOSYS;
    long result = syscall(NR_ASGEN, op, view, argument, size);
    return result < 0 ? -errno : (int)result;
}

int sp_view_supported(void)
{
    static int known;
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
        int before = errno;
        found = access("/proc/self/generations", F_OK) == 0 ? 1 : -1;
        errno = before;
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found > 0;
}

int sp_view_pin(void *start, size_t length)
{
    uint64_t range[2] = {(uintptr_t)start, (uintptr_t)start + length};
    if (!sp_view_supported())
        return -ENOSYS;
    if (mprotect(start, length, PROT_READ) || syscall(NR_MSEAL, start, length, 0))
        return -errno;
    return call(PIN, 0, range, sizeof range);
}

int sp_view_create(int like)
{
    return call(CREATE, like, NULL, 0);
}

int sp_view_write(int view, void *to, const void *from, size_t length)
{
    uint64_t what[3] = {(uintptr_t)to, (uintptr_t)from, length};
    return call(WRITE, view, what, sizeof what);
}

int sp_view_enter(int view)
{
    return call(MIGRATE, view, NULL, 0);
}

int sp_view_delete(int view)
{
    return call(DELETE, view, NULL, 0);
}
