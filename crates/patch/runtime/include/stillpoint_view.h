/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_view.h - memory that differs from thread to thread, on a kernel with address-space generations
 *
 * A view is the program's memory, except for some read-only pages with other content. A thread enters a view by itself;
 * threads and processes that it creates are in it from the start. All threads begin in view 0, the unchanged memory. See
 * asgen(2), and examples/own_key.c for a use of views besides patching.
 *
 * Every call returns -errno on failure; -ENOSYS when the kernel has no generations. All are thread-safe, none allocates.
 */
#ifndef STILLPOINT_VIEW_H
#define STILLPOINT_VIEW_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns 1 if the kernel has generations, otherwise 0. */
int sp_view_supported(void);

/* Allows views to differ in these whole pages of private memory. The pages become read-only, and stay mapped and read-only as
 * long as the program runs (mseal(2)). Returns 0 or -errno. */
int sp_view_pin(void *start, size_t length);

/* Creates a view with the content of view `like`; returns its number, above 0. The cost is independent of the memory size. */
int sp_view_create(int like);

/* Writes to pinned memory in one view: other views do not change. Returns 0 or -errno. */
int sp_view_write(int view, void *to, const void *from, size_t length);

/* Switches the calling thread to this view. Returns the number of the view that it leaves. */
int sp_view_enter(int view);

/* Deletes the view: no thread can enter or change it any more; it ends with the last thread that leaves it. 0 or -errno. */
int sp_view_delete(int view);

#ifdef __cplusplus
}
#endif
#endif
