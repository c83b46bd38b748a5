// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: keeping overlays in step with the base.
 *
 * The obvious way is a notifier of the mm, as for a virtual machine's tables.
 * Its calls come before and after a change, so that faults in between must be
 * held back, and those that drop pointers to tables need hooks besides. But
 * overlays are used by the CPU's own walker on behalf of this very mm: what
 * must leave the TLB must leave them, and nothing else. So they are one more
 * level of it:
 *
 *	who changes the base:	store entry; drop copies;  flush the TLB
 *	who fills an overlay:	[ load entry; store copy ]
 *
 * Brackets and dropping exclude each other by the lock. A fill either comes
 * first, and the copy is dropped and then flushed, or it sees the new entry.
 */
#include <linux/hardirq.h>
#include <linux/mmdebug.h>
#include <linux/uaccess.h>
#include <asm/pgtable.h>

#include "asgen.h"

static unsigned long wanted(struct asgen_mm *am, struct asgen *ag, unsigned long addr, int level)
{
	struct page *page = level == 1 ? xa_load(&ag->pages, addr >> PAGE_SHIFT) : NULL;
	struct asgen_base base;

	if (page)
		return asgen_page_leaf(page);
	base = asgen_base_entry(am->mm, addr, level);
	if (!base.value)
		return 0;
	if (asgen_is_leaf(base.value, base.level))
		return asgen_base_leaf(&base, addr, level);
	/* With page-table isolation the kernel's copy of the top table forbids execution. */
	return base.value & ~_PAGE_NX;
}

static bool fill(struct asgen_mm *am, struct asgen *ag, unsigned long addr)
{
	unsigned long *slot, value, ignored = _PAGE_ACCESSED;
	int level;

	slot = asgen_own_slot(ag, addr, &level);
	value = wanted(am, ag, addr, level);
	if (!asgen_is_leaf(value, level))
		ignored |= _PAGE_NX | _PAGE_DIRTY;
	/* Nothing to be had, or nothing new: the fault is the base's. */
	if (!value || !((*slot ^ value) & ~ignored))
		return false;
	/*
	 * Tables are put in the places of others only after a flush; but an
	 * empty one may have been taken away since (PT_RECLAIM), whose flush
	 * drops this one too.
	 */
	VM_WARN_ON_ONCE(!IS_ENABLED(CONFIG_PT_RECLAIM) && level > 1 && *slot && !asgen_is_leaf(*slot, level) &&
			!asgen_is_leaf(value, level) && ((*slot ^ value) & PTE_PFN_MASK));
	asgen_store(slot, level, value);
	am->fills++;
	return true;
}

bool __asgen_fault(struct mm_struct *mm, unsigned long addr)
{
	struct asgen_mm *am = READ_ONCE(mm->asgen);
	unsigned long flags;
	bool filled = false;

	if (!am || addr >= TASK_SIZE_MAX || in_nmi())
		return false;
	/* Whoever may not wait for a fault may hold the lock, in a tracepoint for instance. */
	if (faulthandler_disabled()) {
		if (!spin_trylock_irqsave(&am->lock, flags))
			return false;
	} else {
		spin_lock_irqsave(&am->lock, flags);
	}
	if (current->asgen)	/* a commit may have taken the thread back */
		filled = fill(am, current->asgen, addr);
	spin_unlock_irqrestore(&am->lock, flags);
	return filled;
}

static void drop_in_all(struct mm_struct *mm, unsigned long start, unsigned long end, bool tables)
{
	struct asgen_mm *am = mm->asgen;
	unsigned long flags;
	struct asgen *ag;

	spin_lock_irqsave(&am->lock, flags);
	list_for_each_entry(ag, &am->generations, list)
		if (ag->entered)
			am->drops += asgen_drop(ag, start, end, tables);
	spin_unlock_irqrestore(&am->lock, flags);
}

void __asgen_flush(struct mm_struct *mm, unsigned long start, unsigned long end, bool tables)
{
	drop_in_all(mm, start & PAGE_MASK, end, tables);
}

/* Reclaim flushes many pages of many processes at once, later. */
void __asgen_flush_later(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	if (asgen_holds(ASGEN_RULE_BATCH))
		drop_in_all(mm, start & PAGE_MASK, end, false);
}

/* The next access that the TLB does not answer fills it, and marks the base as accessed. */
void __asgen_forget(struct mm_struct *mm, unsigned long addr, unsigned long size)
{
	drop_in_all(mm, addr & ~(size - 1), (addr & ~(size - 1)) + size, false);
}
