// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: uprobes.
 *
 * A probe is a breakpoint in the base; the instruction that stood there is run
 * elsewhere. A page that differs has the breakpoint too, if the whole
 * instruction is the base's. If it is another one there is no probe in that
 * generation: what would be run is the base's.
 *
 * Probes are set and taken away with mmap_lock held for writing, or for reading
 * in an mm that had some before.
 */
#include <linux/gfp.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/uprobes.h>
#include <asm/insn.h>
#include <asm/mmu_context.h>

#include "asgen.h"

/* Takes mmap_lock so that no probe comes or goes; whether it is for writing. */
bool asgen_hold_probes(struct mm_struct *mm)
{
	mmap_read_lock(mm);
	if (!mm_flags_test(MMF_HAS_UPROBES, mm))
		return false;
	mmap_read_unlock(mm);
	mmap_write_lock(mm);
	return true;
}

void asgen_release_probes(struct mm_struct *mm, bool writing)
{
	if (writing)
		mmap_write_unlock(mm);
	else
		mmap_read_unlock(mm);
}

/* How much of the probed instruction is in the page in which it begins. */
static size_t length_of(struct mm_struct *mm, unsigned long at, const u8 *insn)
{
	struct insn decoded;
	size_t length = MAX_UINSN_BYTES;

	if (!insn_decode(&decoded, insn, MAX_UINSN_BYTES, is_64bit_mm(mm) ? INSN_MODE_64 : INSN_MODE_32))
		length = decoded.length;
	return min(length, PAGE_SIZE - offset_in_page(at));
}

/* Whether the instruction is the base's, with @first as its first byte: that of the base may be a breakpoint. */
static bool is_same(const u8 *here, const u8 *base, u8 first, size_t length)
{
	return *here == first && !memcmp(here + 1, base + 1, length - 1);
}

struct copy {
	struct mm_struct *mm;
	u8 *to;
	const u8 *base;
	unsigned long start, end;
};

static void probe_in_copy(void *argument, unsigned long at, const u8 *insn)
{
	struct copy *copy = argument;
	unsigned long offset = offset_in_page(at);
	u8 *here = copy->to + offset;
	const u8 *base = copy->base + offset;

	/* Copied, not written. */
	if (*here == UPROBE_SWBP_INSN && (offset < copy->start || offset >= copy->end))
		*here = *insn;
	if (*base == UPROBE_SWBP_INSN && is_same(here, base, *insn, length_of(copy->mm, at, insn)))
		*here = UPROBE_SWBP_INSN;
}

/* @to is to be the generation's page, of which [@start, @end) has just been written; mmap_lock is held. */
void asgen_probe_copy(struct vm_area_struct *vma, unsigned long page, void *to, const void *base,
		      unsigned long start, unsigned long end)
{
	struct copy copy = {vma->vm_mm, to, base, start, end};

	if (mm_flags_test(MMF_HAS_UPROBES, vma->vm_mm) && asgen_holds(ASGEN_RULE_PROBES))
		asgen_each_probe(vma, page, probe_in_copy, &copy);
}

/* A generation in whose page the instruction is the base's, with @first as its first byte; with a reference. */
static struct asgen *find_same(struct asgen_mm *am, unsigned long at, const u8 *base, u8 first, size_t length)
{
	struct page *page;
	struct asgen *ag;

	spin_lock_irq(&am->lock);
	list_for_each_entry(ag, &am->generations, list) {
		page = xa_load(&ag->pages, at >> PAGE_SHIFT);
		if (page && is_same(page_address(page) + offset_in_page(at), base, first, length) &&
		    refcount_inc_not_zero(&ag->refs))
			goto out;
	}
	ag = NULL;
out:
	spin_unlock_irq(&am->lock);
	return ag;
}

/* Charged to the process. A breakpoint that nobody knows any more would end it: what takes one away does not fail. */
static struct page *alloc_changed(struct mm_struct *mm, bool must)
{
	struct mem_cgroup *group = get_mem_cgroup_from_mm(mm), *before = set_active_memcg(group);
	struct page *page = alloc_page(GFP_HIGHUSER | __GFP_ACCOUNT | (must ? __GFP_NOFAIL : 0));

	set_active_memcg(before);
	mem_cgroup_put(group);
	return page;
}

/* The probe at @at was set in the base, or is about to be taken away there. */
void __asgen_probe(struct mm_struct *mm, unsigned long at, const u8 *insn, bool set)
{
	u8 from = set ? *insn : UPROBE_SWBP_INSN, to = set ? UPROBE_SWBP_INSN : *insn;
	size_t length = length_of(mm, at, insn);
	struct asgen_mm *am = mm->asgen;
	struct page *base, *old, *new;
	struct asgen *ag;

	if (!asgen_holds(ASGEN_RULE_PROBES) || get_user_pages_remote(mm, at & PAGE_MASK, 1, 0, &base, NULL) != 1)
		return;
	mutex_lock(&am->probing);
	while ((ag = find_same(am, at, page_address(base) + offset_in_page(at), from, length))) {
		new = alloc_changed(mm, !set);
		if (new) {
			/* Writers are kept away by mmap_lock. */
			old = xa_load(&ag->pages, at >> PAGE_SHIFT);
			copy_highpage(new, old);
			set_page_private(new, page_private(old));
			*((u8 *)page_address(new) + offset_in_page(at)) = to;
			asgen_put_in_place(am, ag, at & PAGE_MASK, new);
		}
		asgen_put(ag);
		if (!new)
			break;
	}
	mutex_unlock(&am->probing);
	put_page(base);
}
