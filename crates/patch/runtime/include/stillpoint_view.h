/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_view.h - memory that differs from thread to thread, on a kernel with address-space generations
 *
 * A view is the program's memory but for some read-only pages, which hold something else. A thread enters a view by itself;
 * threads and processes that it creates are in it from the start. All threads begin in view 0, the memory as it is. See
 * asgen(2), and examples/own_key.c for what a view is good for besides patching.
 *
 * Every call returns -errno on failure; -ENOSYS when the kernel has no generations. All are thread-safe, none allocates.
 */
#ifndef STILLPOINT_VIEW_H
#define STILLPOINT_VIEW_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 1 when the kernel has generations, otherwise 0. */
int sp_view_supported(void);

/* From now on views may differ in these whole pages of private memory. They become read-only, and stay mapped and read-only as
 * long as the program runs (mseal(2)). 0 or -errno. */
int sp_view_pin(void *start, size_t length);

/* A new view that begins as view `like` is; its number, above 0. Costs the same however much memory the program has. */
int sp_view_create(int like);

/* Writes to pinned memory as a view shows it: other views show what they showed. 0 or -errno. */
int sp_view_write(int view, void *to, const void *from, size_t length);

/* The calling thread sees this view from here on. The number of the view that it leaves. */
int sp_view_enter(int view);

/* Nobody can enter or change the view any more; it goes with the last thread that leaves it. 0 or -errno. */
int sp_view_delete(int view);

#ifdef __cplusplus
}
#endif
#endif
