/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Shadow variables: state that a live patch attaches to objects of the running program whose layout it must not
 * change. A shadow is found by the address of the object and a number that the patch chooses. See
 * stillpoint-patch-hooks(7).
 *
 * All functions may be called by any thread at any time; none blocks for longer than a list takes to walk. None may
 * be called from a signal handler.
 */
#ifndef STILLPOINT_SHADOW_H
#define STILLPOINT_SHADOW_H

#include <stddef.h>

/* The shadow of `object` with number `id`, or NULL. It stays valid until sp_shadow_free. */
void *sp_shadow_get(const void *object, unsigned long id);

/* The shadow of `object` with number `id`; made of `size` zero bytes when there is none. NULL when there is no
 * memory. Of several threads that ask at once, all get the same one. */
void *sp_shadow_get_or_alloc(const void *object, unsigned long id, size_t size);

/* Like sp_shadow_get_or_alloc, but NULL when the shadow exists already. */
void *sp_shadow_alloc(const void *object, unsigned long id, size_t size);

/* Ends the shadow, if there is one: to be called where the object itself ends. */
void sp_shadow_free(const void *object, unsigned long id);

/* Ends every shadow with number `id`; to be called by a post-revert hook. It calls no allocator: the memory is freed
 * by the next allocation of a shadow. */
void sp_shadow_free_all(unsigned long id);

#endif
