/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Shadow variables: a hash table of lists, each list under a spin lock of its own. The locks are held for a walk over
 * one list, never over an allocation: a thread that is stopped while it holds one delays only users of that list.
 */
#include "stillpoint-shadow.h"

#include <stdint.h>
#include <stdlib.h>

#define LISTS 1024

struct shadow {
    struct shadow *next;
    const void *object;
    unsigned long id;
    /* start of the bytes that users see, aligned for any type */
    _Alignas(16) unsigned char bytes[];
};

static struct list {
    struct shadow *first;
    int locked;
} lists[LISTS];

/* Shadows that ended where no memory may be freed; the next allocation frees them. */
static struct list dead;

static struct list *list_of(const void *object, unsigned long id)
{
    uint64_t key = ((uint64_t)(uintptr_t)object >> 4) ^ ((uint64_t)id << 32 | id);
    return &lists[(key * UINT64_C(0x9e3779b97f4a7c15)) >> 54];
}

static void lock(struct list *list)
{
    while (__atomic_exchange_n(&list->locked, 1, __ATOMIC_ACQUIRE))
        __builtin_ia32_pause();
}

static void unlock(struct list *list)
{
    __atomic_store_n(&list->locked, 0, __ATOMIC_RELEASE);
}

static void bury(void)
{
    struct shadow *ended;

    lock(&dead);
    ended = dead.first;
    dead.first = NULL;
    unlock(&dead);
    while (ended) {
        struct shadow *next = ended->next;
        free(ended);
        ended = next;
    }
}

static struct shadow *find(const struct list *list, const void *object, unsigned long id)
{
    struct shadow *shadow = list->first;
    while (shadow && (shadow->object != object || shadow->id != id))
        shadow = shadow->next;
    return shadow;
}

void *sp_shadow_get(const void *object, unsigned long id)
{
    struct list *list = list_of(object, id);
    struct shadow *shadow;

    lock(list);
    shadow = find(list, object, id);
    unlock(list);
    return shadow ? shadow->bytes : NULL;
}

static void *make(const void *object, unsigned long id, size_t size, int may_exist)
{
    struct list *list = list_of(object, id);
    struct shadow *made, *found;

    if (size > SIZE_MAX - sizeof *made)
        return NULL;
    bury();
    made = calloc(1, sizeof *made + size);
    if (!made)
        return NULL;
    made->object = object;
    made->id = id;
    lock(list);
    found = find(list, object, id);
    if (!found) {
        made->next = list->first;
        list->first = made;
    }
    unlock(list);
    if (!found)
        return made->bytes;
    free(made);
    return may_exist ? found->bytes : NULL;
}

void *sp_shadow_get_or_alloc(const void *object, unsigned long id, size_t size)
{
    void *found = sp_shadow_get(object, id);
    return found ? found : make(object, id, size, 1);
}

void *sp_shadow_alloc(const void *object, unsigned long id, size_t size)
{
    return make(object, id, size, 0);
}

void sp_shadow_free(const void *object, unsigned long id)
{
    struct list *list = list_of(object, id);
    struct shadow **link, *ended = NULL;

    lock(list);
    for (link = &list->first; *link; link = &(*link)->next) {
        if ((*link)->object == object && (*link)->id == id) {
            ended = *link;
            *link = ended->next;
            break;
        }
    }
    unlock(list);
    free(ended);
}

void sp_shadow_free_all(unsigned long id)
{
    for (size_t i = 0; i < LISTS; i++) {
        struct shadow **link;

        lock(&lists[i]);
        for (link = &lists[i].first; *link;) {
            struct shadow *shadow = *link;
            if (shadow->id != id) {
                link = &shadow->next;
                continue;
            }
            *link = shadow->next;
            lock(&dead);
            shadow->next = dead.first;
            dead.first = shadow;
            unlock(&dead);
        }
        unlock(&lists[i]);
    }
}
