// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: the tables of an overlay.
 *
 * An overlay has a top table and, on the way to each page that differs, tables
 * of its own; every other entry is a copy of the base's at the level where the
 * ways part, so that all below is shared. Entries that lead to its own tables
 * carry a mark in a bit that the hardware ignores.
 *
 * A level is counted as the hardware manuals do: 1 is a table of pages, the
 * top is 4 or 5.
 */
#include <linux/gfp.h>
#include <linux/io.h>
#include <asm/asgen.h>
#include <asm/pgalloc.h>
#include <asm/pgtable.h>

#include "asgen.h"

#define ASGEN_OWN _PAGE_SOFTW1

int asgen_top(void)
{
	return pgtable_l5_enabled() ? 5 : 4;
}

static unsigned int shift_of(int level)
{
	return PAGE_SHIFT + (PMD_SHIFT - PAGE_SHIFT) * (level - 1);
}

unsigned long asgen_slot_size(int level)
{
	return 1UL << shift_of(level);
}

static unsigned long *slot_of(unsigned long *table, unsigned long addr, int level)
{
	return table + ((addr >> shift_of(level)) & (PTRS_PER_PTE - 1));
}

static unsigned long *table_of(unsigned long value)
{
	return __va(value & PTE_PFN_MASK);
}

bool asgen_is_leaf(unsigned long value, int level)
{
	return level == 1 || (level <= 3 && (value & _PAGE_PSE));
}

static bool is_own(unsigned long value, int level)
{
	return level > 1 && (value & ASGEN_OWN);
}

/*
 * Interrupts are off and the mm is the current thread's: whoever frees one of
 * its tables has to interrupt this CPU first, or waits until it may be
 * interrupted (RCU), as for gup_fast().
 */
struct asgen_base asgen_base_entry(struct mm_struct *mm, unsigned long addr, int level)
{
	unsigned long *table = (unsigned long *)mm->pgd;
	struct asgen_base base;

	for (base.level = asgen_top(); ; base.level--) {
		base.slot = slot_of(table, addr, base.level);
		base.value = READ_ONCE(*base.slot);
		if (!(base.value & _PAGE_PRESENT)) {
			base.value = 0;
			return base;
		}
		if (base.level == level || asgen_is_leaf(base.value, base.level))
			return base;
		table = table_of(base.value);
	}
}

/* The entry for @addr in the lowest table on its way that is the overlay's own. */
unsigned long *asgen_own_slot(struct asgen *ag, unsigned long addr, int *level)
{
	unsigned long *table = (unsigned long *)ag->pgd;

	for (*level = asgen_top(); ; --*level) {
		unsigned long *slot = slot_of(table, addr, *level);

		if (!is_own(*slot, *level))
			return slot;
		table = table_of(*slot);
	}
}

/* A value from the base: it must not look like a way to a table of the overlay's own. */
void asgen_store(unsigned long *slot, int level, unsigned long value)
{
	if (level > 1)
		value &= ~ASGEN_OWN;
	/* The top table may be two, one of which user space runs with. */
	if (level == asgen_top())
		set_pgd((pgd_t *)slot, __pgd(value));
	else
		WRITE_ONCE(*slot, value);
}

/* Whether a flush of [start, end) takes away the copy in the slot at @addr. */
static bool drops(unsigned long value, int level, unsigned long addr, unsigned long start, unsigned long end,
		  bool tables)
{
	if (asgen_is_leaf(value, level))
		return asgen_holds(ASGEN_RULE_LEAVES);
	/*
	 * Who unlinks a table says so, or flushes all that it covered. A flush
	 * of less leaves the table where it is, and the copy as good as it was.
	 */
	return (tables || (start <= addr && addr + asgen_slot_size(level) <= end)) && asgen_holds(ASGEN_RULE_TABLES);
}

static unsigned long drop_in(unsigned long *table, int level, unsigned long start, unsigned long end,
			     unsigned long first, unsigned long last, bool tables)
{
	unsigned long size = asgen_slot_size(level), addr, dropped = 0;

	for (addr = first & ~(size - 1); addr < last; addr += size) {
		unsigned long *slot = slot_of(table, addr, level), value = *slot;

		if (!value)
			continue;
		if (is_own(value, level)) {
			dropped += drop_in(table_of(value), level - 1, start, end, max(addr, first),
					   min(addr + size, last), tables);
		} else if (drops(value, level, addr, start, end, tables)) {
			asgen_store(slot, level, 0);
			dropped++;
		}
	}
	return dropped;
}

/* Drops what the overlay copied from the base for [start, end), its own pages' entries among it: they are filled anew. */
unsigned long asgen_drop(struct asgen *ag, unsigned long start, unsigned long end, bool tables)
{
	return drop_in((unsigned long *)ag->pgd, asgen_top(), start, end, start, min(end, TASK_SIZE_MAX), tables);
}

/* Tables of its own all the way to @addr. New ones begin empty: what was shared there comes back by faults. */
int asgen_own_path(struct asgen_mm *am, struct asgen *ag, unsigned long addr)
{
	for (;;) {
		struct page *spare = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		unsigned long *slot, value;
		int level;

		if (!spare)
			return -ENOMEM;
		value = _PAGE_TABLE | ASGEN_OWN | page_to_phys(spare);
		spin_lock_irq(&am->lock);
		slot = asgen_own_slot(ag, addr, &level);
		if (level == 1) {
			spin_unlock_irq(&am->lock);
			__free_page(spare);
			return 0;
		}
		if (level == asgen_top())
			set_pgd((pgd_t *)slot, __pgd(value));
		else
			WRITE_ONCE(*slot, value);
		list_add(&spare->lru, &ag->tables);
		ag->nr_tables++;
		spin_unlock_irq(&am->lock);
	}
}

void asgen_free_tables(struct asgen *ag)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &ag->tables, lru) {
		list_del(&page->lru);
		__free_page(page);
	}
	if (ag->pgd)
		asgen_pgd_free(ag->mm, ag->pgd);
}

/* Descriptors of segments, where page-table isolation maps them: both tables of the top lead there. */
void asgen_copy_ldt(struct asgen *ag)
{
#if defined(CONFIG_MODIFY_LDT_SYSCALL) && defined(CONFIG_MITIGATION_PAGE_TABLE_ISOLATION)
	pgd_t value = *pgd_offset(ag->mm, LDT_BASE_ADDR), *to = pgd_offset_pgd(ag->pgd, LDT_BASE_ADDR);

	if (!boot_cpu_has(X86_FEATURE_PTI))
		return;
	set_pgd(to, value);
	set_pgd(kernel_to_user_pgdp(to), value);
#endif
}

void __asgen_map_ldt(struct mm_struct *mm)
{
	struct asgen_mm *am = mm->asgen;
	struct asgen *ag;

	spin_lock_irq(&am->lock);
	list_for_each_entry(ag, &am->generations, list)
		asgen_copy_ldt(ag);
	spin_unlock_irq(&am->lock);
}
