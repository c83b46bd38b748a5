/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Shadow variables: state that a live patch attaches to objects of the running program whose layout it must not
 * change. A shadow is found by the address of the object and a number that the patch chooses. See
 * stillpoint-patch-hooks(7).
 *
 * All functions may be called by any thread at any time; none blocks for longer than the walk of one list. None may be
 * called from a signal handler.
 */
#ifndef STILLPOINT_SHADOW_H
#define STILLPOINT_SHADOW_H

#include <stddef.h>

/* Returns the shadow of `object` with number `id`, or NULL. It stays valid until sp_shadow_free. */
void *sp_shadow_get(const void *object, unsigned long id);

/* Returns the shadow of `object` with number `id`; makes one of `size` zero bytes when there is none. NULL when there
 * is no memory. Several threads that call it at once all get the same one. */
void *sp_shadow_get_or_alloc(const void *object, unsigned long id, size_t size);

/* Works like sp_shadow_get_or_alloc, but returns NULL when the shadow exists already. */
void *sp_shadow_alloc(const void *object, unsigned long id, size_t size);

/* Ends the shadow, if there is one; call it where the object itself ends. */
void sp_shadow_free(const void *object, unsigned long id);

/* Ends every shadow with number `id`; call it in a post-revert hook. It calls no allocator: the next allocation of a
 * shadow frees the memory. */
void sp_shadow_free_all(unsigned long id);

#endif
