/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Members that a live patch adds to structures of a running program: a table from the address of an object and the
 * number of a member to the bytes of that member.
 *
 * An entry, once made, belongs to its address for ever: entries are only added, each by one compare-and-exchange, so
 * that threads, signal handlers and forked children can look up at any instant. A new object at the same address gets
 * zero bytes where the patched code allocates or clears it. Memory is one mapping of fixed size, of which the kernel
 * provides the touched pages. A look-up that finds no room answers with the caller's own copy of the initial value: the
 * member then keeps this value, and what is stored in it is lost.
 */
#include <stdint.h>

/* A power of two; tests make it small. */
#ifndef SLOTS
#define SLOTS (UINT64_C(1) << 20)
#endif
#define ENTRIES_MAX (SLOTS / 4 * 3)
#define ENTRY_BYTES 64
/* Limit of bytes of one member; the type of each member is checked against it when it is compiled. */
#define MEMBER_MAX 48
#define ID_SHIFT 48
/* Alignment of the objects. */
#define STEP 8

struct entry {
    uint64_t key;
    uint64_t unused;
    _Alignas(16) unsigned char bytes[MEMBER_MAX];
};

struct table {
    struct entry *slots[SLOTS];
    uint64_t entries_used;
    _Alignas(64) struct entry entries[ENTRIES_MAX];
};

_Static_assert(sizeof(struct entry) == ENTRY_BYTES, "an entry is one cache line");

static struct table *the_table;
/* Entry that a thread made in vain, as another one was first: the next one takes it. */
static struct entry *spare;
/* Number of look-ups that found no room. */
unsigned long __stillpoint_members_lost;

void *__stillpoint_member(unsigned long object, unsigned long id, unsigned long len, void *value);
void __stillpoint_member_clear(unsigned long start, unsigned long len, unsigned long id);
int __stillpoint_members_forget(void);

static long map(uint64_t len)
{
    long result;
    /* mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) */
    register long flags __asm__("r10") = 0x4022;
    register long fd __asm__("r8") = -1;
    register long offset __asm__("r9") = 0;

    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(9L), "D"(0L), "S"(len), "d"(3L), "r"(flags), "r"(fd), "r"(offset)
                     : "rcx", "r11", "memory");
    return result;
}

static void unmap(long start, uint64_t len)
{
    long result;

    __asm__ volatile("syscall" : "=a"(result) : "a"(11L), "D"(start), "S"(len) : "rcx", "r11", "memory");
}

static long discard(struct table *start)
{
    long result;

    /* madvise(start, len, MADV_DONTNEED): the pages are zero after it */
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(28L), "D"(start), "S"(sizeof *start), "d"(4L)
                     : "rcx", "r11", "memory");
    return result;
}

static struct table *table(void)
{
    struct table *found = __atomic_load_n(&the_table, __ATOMIC_ACQUIRE);
    long mapped;

    if (found)
        return found;
    mapped = map(sizeof(struct table));
    if (mapped < 0 && mapped > -4096)
        return 0;
    if (__atomic_compare_exchange_n(&the_table, &found, (struct table *)mapped, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return (struct table *)mapped;
    unmap(mapped, sizeof(struct table));
    return found;
}

static uint64_t key_of(uint64_t object, unsigned long id)
{
    return (object & ((UINT64_C(1) << ID_SHIFT) - 1)) | (uint64_t)id << ID_SHIFT;
}

static uint64_t first_slot(uint64_t key)
{
    uint64_t mixed = key * UINT64_C(0x9e3779b97f4a7c15);
    return (mixed ^ mixed >> 29) % SLOTS;
}

static void copy(void *to, const void *from, unsigned long len)
{
    unsigned char *out = to;
    const unsigned char *in = from;

    while (len--) {
        *out++ = *in++;
        /* so that no compiler makes a call of a library of it */
        __asm__ volatile("" : : : "memory");
    }
}

static struct entry *take(struct table *in)
{
    struct entry *entry = __atomic_exchange_n(&spare, (struct entry *)0, __ATOMIC_ACQ_REL);
    uint64_t number;

    if (entry)
        return entry;
    if (__atomic_load_n(&in->entries_used, __ATOMIC_RELAXED) >= ENTRIES_MAX)
        return 0;
    number = __atomic_fetch_add(&in->entries_used, 1, __ATOMIC_RELAXED);
    return number < ENTRIES_MAX ? &in->entries[number] : 0;
}

/* Returns the entry of a key. Without one, makes it with `value`, unless that is NULL. */
static struct entry *find(struct table *in, uint64_t key, unsigned long len, const void *value)
{
    struct entry *made = 0;
    uint64_t at = first_slot(key);

    for (;; at = (at + 1) % SLOTS) {
        struct entry *there = __atomic_load_n(&in->slots[at], __ATOMIC_ACQUIRE);
        if (!there) {
            if (!value)
                return 0;
            if (!made) {
                made = take(in);
                if (!made)
                    return 0;
                made->key = key;
                copy(made->bytes, value, len);
            }
            if (__atomic_compare_exchange_n(&in->slots[at], &there, made, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                return made;
        }
        if (there->key == key) {
            if (made)
                __atomic_store_n(&spare, made, __ATOMIC_RELEASE);
            return there;
        }
    }
}

/* Returns the member `id` of the object at an address, which is a number here, as the object itself is not accessed. The
 * first look-up gives the member the initial value, which is the caller's own copy. */
void *__stillpoint_member(unsigned long object, unsigned long id, unsigned long len, void *value)
{
    struct table *in = table();
    struct entry *entry = in ? find(in, key_of(object, id), len, value) : 0;

    if (entry)
        return entry->bytes;
    __atomic_fetch_add(&__stillpoint_members_lost, 1, __ATOMIC_RELAXED);
    return value;
}

/* Clears the member `id` of all objects in a range: they are new, or cleared. */
void __stillpoint_member_clear(unsigned long start, unsigned long len, unsigned long id)
{
    static const unsigned char zero[MEMBER_MAX];
    struct table *in = __atomic_load_n(&the_table, __ATOMIC_ACQUIRE);
    unsigned long skipped = -start % STEP;
    uint64_t from = key_of(start + skipped, id);
    uint64_t used;

    if (!in || !start || len < skipped)
        return;
    len -= skipped;
    used = __atomic_load_n(&in->entries_used, __ATOMIC_RELAXED);
    if (len / STEP < used) {
        for (uint64_t key = from; key - from < len; key += STEP) {
            struct entry *entry = find(in, key, 0, 0);
            if (entry)
                copy(entry->bytes, zero, MEMBER_MAX);
        }
        return;
    }
    for (uint64_t i = 0; i < used && i < ENTRIES_MAX; i++)
        if (__atomic_load_n(&in->entries[i].key, __ATOMIC_RELAXED) - from < len)
            copy(in->entries[i].bytes, zero, MEMBER_MAX);
}

/* Hook for moments at which no new code runs: forgets all members, and gives their memory back. */
int __stillpoint_members_forget(void)
{
    struct table *in = __atomic_load_n(&the_table, __ATOMIC_ACQUIRE);

    __atomic_store_n(&spare, (struct entry *)0, __ATOMIC_RELEASE);
    return in && discard(in) ? 1 : 0;
}
