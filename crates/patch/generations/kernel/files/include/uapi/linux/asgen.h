/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * Address-space generations: threads of one process that see different
 * contents of its sealed, read-only pages. See asgen(2).
 */
#ifndef _UAPI_LINUX_ASGEN_H
#define _UAPI_LINUX_ASGEN_H

#include <linux/types.h>

/* long asgen(unsigned int op, int generation, void *arg, size_t size) */
enum asgen_op {
	ASGEN_REGISTER,	/* at start-up: get ready; create does it otherwise */
	ASGEN_PIN,	/* arg: struct asgen_range[]; where generations may differ */
	ASGEN_CREATE,	/* returns a new generation, which begins as the named one */
	ASGEN_WRITE,	/* arg: struct asgen_write */
	ASGEN_MIGRATE,	/* the calling thread; returns the generation it leaves */
	ASGEN_COMMIT,	/* all threads are there: make it the base */
	ASGEN_DELETE,	/* at once, or when its last thread leaves */
	ASGEN_STATUS,	/* arg: struct asgen_status */
	ASGEN_COMMIT_WHEREVER,	/* as COMMIT, wherever threads are: they stand outside of what differs */
};

struct asgen_range {
	__u64 start;
	__u64 end;
};

struct asgen_write {
	__u64 address;
	__u64 data;
	__u64 length;
};

struct asgen_status {
	__u32 current_generation;	/* of the calling thread */
	__u32 generations;		/* of the process, without the base */
	__u32 threads;			/* in the named generation */
	__u32 tables;			/* page tables of its own */
	__u64 pages;			/* that differ from the base */
	__u64 fills;			/* of the process: entries taken from the base */
	__u64 drops;			/* entries dropped because the base changed */
};

#endif
