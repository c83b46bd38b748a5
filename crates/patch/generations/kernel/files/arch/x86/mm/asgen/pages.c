// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: pages that differ from the base.
 *
 * They are the generation's own, charged to the writer's memory control group,
 * and on no list of the memory management: they are not reclaimed. Whatever is
 * not written stays the base's page, so nothing else has to be held.
 *
 * A page is never changed in place: others may be executing it. A changed copy
 * takes its place in one step.
 */
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/uaccess.h>
#include <asm/tlbflush.h>

#include "asgen.h"

static void free_copy(struct page *page)
{
	if (page)
		put_page(page);
}

/* With a reference. Another may be put in its place at any moment: that one is taken then. */
struct page *asgen_get_page(struct asgen *ag, unsigned long addr)
{
	struct page *page;

	rcu_read_lock();
	while ((page = xa_load(&ag->pages, addr >> PAGE_SHIFT))) {
		if (!get_page_unless_zero(page))
			continue;
		if (page == xa_load(&ag->pages, addr >> PAGE_SHIFT))
			break;
		put_page(page);
	}
	rcu_read_unlock();
	return page;
}

/* Puts @new in the place of what the generation saw at @addr; no CPU sees the old one afterwards. Tables lead there. */
int asgen_put_in_place(struct asgen_mm *am, struct asgen *ag, unsigned long addr, struct page *new)
{
	struct page *old = xa_store(&ag->pages, addr >> PAGE_SHIFT, new, GFP_KERNEL_ACCOUNT);

	if (xa_is_err(old))
		return xa_err(old);
	if (!old)
		ag->nr_pages++;
	/* Who enters now sees the new page; who was there before may hold the old one, or paths shared with the base. */
	smp_mb();
	if (READ_ONCE(ag->entered))
		flush_tlb_mm_range(am->mm, addr, addr + PAGE_SIZE, PAGE_SHIFT, true);
	free_copy(old);
	return 0;
}

/* What was not written of @new is what the generation sees so far; its private field is the protection that it is mapped with. */
static long fill_in(struct asgen_mm *am, struct asgen *ag, struct page *new, unsigned long addr, size_t length)
{
	unsigned long page = addr & PAGE_MASK, start = offset_in_page(addr), end = start + length;
	struct page *old = xa_load(&ag->pages, addr >> PAGE_SHIFT), *base;
	struct vm_area_struct *vma = vma_lookup(am->mm, addr);
	long ret = vma ? get_user_pages_remote(am->mm, page, 1, 0, &base, NULL) : 0;
	void *from, *to = page_address(new);

	if (ret != 1)
		return ret < 0 ? ret : -EFAULT;
	from = page_address(old ?: base);
	memcpy(to, from, start);
	memcpy(to + end, from + end, PAGE_SIZE - end);
	set_page_private(new, old ? page_private(old) : pgprot_val(vma->vm_page_prot));
	asgen_probe_copy(vma, page, to, page_address(base), start, end);
	put_page(base);
	return 0;
}

static long write_in_page(struct asgen_mm *am, struct asgen *ag, unsigned long addr, const void *bytes,
			  const void __user *user, size_t length)
{
	struct page *new = alloc_page(GFP_HIGHUSER | __GFP_ACCOUNT);
	bool writing;
	long ret = 0;
	void *to;

	if (!new)
		return -ENOMEM;
	to = page_address(new) + offset_in_page(addr);
	if (bytes)
		memcpy(to, bytes, length);
	else if (copy_from_user(to, user, length))
		ret = -EFAULT;
	if (!ret) {
		writing = asgen_hold_probes(am->mm);
		ret = fill_in(am, ag, new, addr, length) ?: asgen_own_path(am, ag, addr) ?:
			asgen_put_in_place(am, ag, addr & PAGE_MASK, new);
		asgen_release_probes(am->mm, writing);
	}
	if (ret)
		free_copy(new);
	return ret;
}

int asgen_change(struct asgen_mm *am, struct asgen *ag, unsigned long addr, const void *bytes, size_t length)
{
	return write_in_page(am, ag, addr, bytes, NULL, length);
}

long asgen_write(struct asgen_mm *am, struct asgen *ag, const struct asgen_write *write)
{
	const char __user *from = u64_to_user_ptr(write->data);
	unsigned long addr = write->address, left = write->length;

	if (!asgen_pinned(am, addr, left))
		return -EINVAL;
	while (left) {
		size_t length = min(left, PAGE_SIZE - offset_in_page(addr));
		long ret = write_in_page(am, ag, addr, NULL, from, length);

		if (ret)
			return ret;
		addr += length;
		from += length;
		left -= length;
		cond_resched();
	}
	return 0;
}

/* @to is new: nobody sees it yet. */
int asgen_share_pages(struct asgen *to, struct asgen *from)
{
	struct page *page;
	unsigned long index;

	xa_for_each(&from->pages, index, page) {
		int ret;

		page = asgen_get_page(from, index << PAGE_SHIFT);
		ret = xa_err(xa_store(&to->pages, index, page, GFP_KERNEL_ACCOUNT));
		if (ret) {
			put_page(page);
			return ret;
		}
		to->nr_pages++;
		ret = asgen_own_path(to->mm->asgen, to, index << PAGE_SHIFT);
		if (ret)
			return ret;
	}
	return 0;
}

/* A probe that is set meanwhile puts another page in its place, and a breakpoint in the base: that page counts then. */
static int page_to_base(struct asgen_mm *am, struct asgen *ag, unsigned long addr)
{
	struct page *page;
	bool again, failed;

	do {
		page = asgen_get_page(ag, addr);
		failed = access_remote_vm(am->mm, addr, page_address(page), PAGE_SIZE, FOLL_FORCE | FOLL_WRITE) != PAGE_SIZE;
		again = page != xa_load(&ag->pages, addr >> PAGE_SHIFT);
		put_page(page);
	} while (again && !failed);
	return failed ? -EFAULT : 0;
}

int asgen_pages_to_base(struct asgen_mm *am, struct asgen *ag)
{
	struct page *page;
	unsigned long index;
	int ret = 0;

	xa_for_each(&ag->pages, index, page) {
		ret = page_to_base(am, ag, index << PAGE_SHIFT);
		if (ret)
			break;
	}
	return ret;
}

void asgen_free_pages(struct asgen *ag)
{
	struct page *page;
	unsigned long index;

	xa_for_each(&ag->pages, index, page)
		free_copy(page);
	xa_destroy(&ag->pages);
}
