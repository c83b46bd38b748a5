// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: what a leaf of an overlay may say.
 *
 * The hardware notes accesses and writes in the entry that it walked, which is
 * the overlay's. The base must know of them before they happen.
 */
#include <linux/atomic.h>
#include <asm/pgtable.h>

#include "asgen.h"

/* The 4K part at @addr of a 2M leaf. */
static unsigned long part_of(unsigned long value, unsigned long addr)
{
	pmd_t pmd = __pmd(value);

	return pte_val(pfn_pte(pmd_pfn(pmd) + pte_index(addr), pgprot_large_2_4k(pmd_pgprot(pmd))));
}

/* The base's leaf, for a table at @level; 0: not to be had now. */
unsigned long asgen_base_leaf(struct asgen_base *base, unsigned long addr, int level)
{
	unsigned long value = base->value;

	/* As the hardware would: in one step, and only if the entry is still what was read. */
	if (!(value & _PAGE_ACCESSED)) {
		if (!try_cmpxchg(base->slot, &value, value | _PAGE_ACCESSED))
			return 0;
		value |= _PAGE_ACCESSED;
	}
	/* A write through the overlay makes the overlay dirty and not the base, which would then lose the page's contents. */
	if ((value & _PAGE_RW) && !(value & _PAGE_DIRTY) && asgen_holds(ASGEN_RULE_DIRTY))
		value &= ~_PAGE_RW;
	if (base->level == level)
		return value;
	/* Ranges in which generations differ hold no pages of 1G. */
	return WARN_ON_ONCE(base->level != 2 || level != 1) ? 0 : part_of(value, addr);
}

unsigned long asgen_page_leaf(struct page *page)
{
	pgprot_t protection = __pgprot(page_private(page));

	return pte_val(pte_mkyoung(pfn_pte(page_to_pfn(page), protection)));
}
