/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _ASGEN_INTERNAL_H
#define _ASGEN_INTERNAL_H

#include <linux/asgen.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/sched/coredump.h>
#include <linux/spinlock.h>
#include <linux/version.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <uapi/linux/asgen.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(7, 0, 0)
#define mm_flags_test(flag, mm) test_bit(flag, &(mm)->flags)
#endif

#define ASGEN_RANGES_MAX 64

struct asgen {
	struct list_head list;		/* asgen_mm.generations */
	struct mm_struct *mm;
	pgd_t *pgd;
	u64 ctx_id;			/* the TLB knows it by this: never used again */
	int id;
	bool entered;			/* a thread was there: its tables may hold copies of the base's */
	bool deleted;			/* nobody finds it any more */
	atomic_t threads;
	refcount_t refs;		/* threads, whoever looks at it, and 1 until it is deleted */
	struct list_head tables;	/* its own, by page->lru */
	unsigned int nr_tables;
	struct xarray pages;		/* those that differ from the base, by page number */
	unsigned long nr_pages;
};

struct asgen_mm {
	struct mm_struct *mm;
	struct mutex change;		/* who creates, writes, commits or deletes */
	struct mutex probing;		/* who sets or takes away a probe */
	/*
	 * The lists, all tables of all generations, and which task is where. Taken inside page-table locks and with
	 * interrupts off; nothing is taken inside it.
	 */
	spinlock_t lock;
	struct list_head generations;
	int last_id;
	struct asgen *committing;	/* nobody goes anywhere else */
	unsigned int nr_ranges;
	struct asgen_range ranges[ASGEN_RANGES_MAX];
	struct work_struct reaper;	/* frees what has no reference left */
	u64 fills, drops;
};

/* An entry of the base: a table at @level or a leaf at @level or above; value 0: there is none. */
struct asgen_base {
	unsigned long *slot;
	unsigned long value;
	int level;
};

/* tables.c */
int asgen_top(void);
unsigned long asgen_slot_size(int level);
bool asgen_is_leaf(unsigned long value, int level);
struct asgen_base asgen_base_entry(struct mm_struct *mm, unsigned long addr, int level);
unsigned long *asgen_own_slot(struct asgen *ag, unsigned long addr, int *level);
void asgen_store(unsigned long *slot, int level, unsigned long value);
unsigned long asgen_drop(struct asgen *ag, unsigned long start, unsigned long end, bool tables);
int asgen_own_path(struct asgen_mm *am, struct asgen *ag, unsigned long addr);
void asgen_free_tables(struct asgen *ag);
void asgen_copy_ldt(struct asgen *ag);

/* leaves.c */
unsigned long asgen_base_leaf(struct asgen_base *base, unsigned long addr, int level);
unsigned long asgen_page_leaf(struct page *page);

/* ranges.c */
int asgen_pin(struct asgen_mm *am, const struct asgen_range __user *ranges, size_t nr);
bool asgen_pinned(struct asgen_mm *am, unsigned long start, unsigned long length);

/* pages.c */
long asgen_write(struct asgen_mm *am, struct asgen *ag, const struct asgen_write *write);
int asgen_change(struct asgen_mm *am, struct asgen *ag, unsigned long addr, const void *bytes, size_t length);
struct page *asgen_get_page(struct asgen *ag, unsigned long addr);
int asgen_put_in_place(struct asgen_mm *am, struct asgen *ag, unsigned long addr, struct page *new);
int asgen_share_pages(struct asgen *to, struct asgen *from);
int asgen_pages_to_base(struct asgen_mm *am, struct asgen *ag);
void asgen_free_pages(struct asgen *ag);

/* generation.c */
struct asgen *asgen_find(struct asgen_mm *am, int id);
struct asgen *asgen_get_of(struct asgen_mm *am, struct task_struct *task);
void asgen_put(struct asgen *ag);
struct asgen *asgen_new(struct asgen_mm *am, struct asgen *like, int id);
int asgen_create(struct asgen_mm *am, int like);
int asgen_migrate(struct asgen_mm *am, int id);
int asgen_commit(struct asgen_mm *am, int id, bool wherever);
int asgen_delete(struct asgen_mm *am, int id);
void asgen_free(struct asgen *ag);

/* process.c */
struct asgen_mm *asgen_register(struct mm_struct *mm);

/* probes.c */
#ifdef CONFIG_UPROBES
bool asgen_hold_probes(struct mm_struct *mm);
void asgen_release_probes(struct mm_struct *mm, bool writing);
void asgen_probe_copy(struct vm_area_struct *vma, unsigned long page, void *to, const void *base,
		      unsigned long start, unsigned long end);
#else
static inline bool asgen_hold_probes(struct mm_struct *mm)
{
	mmap_read_lock(mm);
	return false;
}

static inline void asgen_release_probes(struct mm_struct *mm, bool writing)
{
	mmap_read_unlock(mm);
}

#define asgen_probe_copy(vma, page, to, base, start, end) do { } while (0)
#endif

/* reload.c */
void asgen_load(struct mm_struct *mm);
void asgen_reload_all(struct mm_struct *mm);
u64 asgen_new_context(void);

/* knock_out.c */
enum asgen_rule {
	ASGEN_RULE_LEAVES,	/* a flush drops copied leaves */
	ASGEN_RULE_TABLES,	/* a flush drops copied pointers to tables */
	ASGEN_RULE_BATCH,	/* a flush that is put off counts as one at once */
	ASGEN_RULE_DIRTY,	/* a leaf may be written only once the base is dirty */
	ASGEN_RULE_REAP,	/* deleting leaves threads where they are */
	ASGEN_RULE_PROBES,	/* a page that differs has the probes of what does not */
	ASGEN_RULE_ASID,	/* a generation has a TLB context of its own */
	ASGEN_RULE_BEHIND,	/* a TLB context that is loaded again is flushed if it fell behind */
	ASGEN_RULE_GLOBAL,	/* an mm with generations uses no global TLB context */
	ASGEN_RULE_LEAVE,	/* a CPU that is still in one leaves it when it has to flush */
};

#ifdef CONFIG_ASGEN_KNOCK_OUT
bool asgen_holds(enum asgen_rule rule);
#else
static inline bool asgen_holds(enum asgen_rule rule)
{
	return true;
}
#endif

#endif
