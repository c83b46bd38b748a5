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

/* A new page with what the generation sees at @addr; its private field is the protection that it is mapped with. */
static struct page *copy_page_at(struct asgen_mm *am, struct asgen *ag, unsigned long addr)
{
	struct page *old = xa_load(&ag->pages, addr >> PAGE_SHIFT);
	struct page *new = alloc_page(GFP_HIGHUSER | __GFP_ACCOUNT);
	struct vm_area_struct *vma;
	long ret = 0;

	if (!new)
		return ERR_PTR(-ENOMEM);
	if (old) {
		copy_highpage(new, old);
		set_page_private(new, page_private(old));
		return new;
	}
	mmap_read_lock(am->mm);
	vma = vma_lookup(am->mm, addr);
	if (vma)
		ret = get_user_pages_remote(am->mm, addr, 1, 0, &old, NULL);
	if (ret == 1) {
		copy_highpage(new, old);
		set_page_private(new, pgprot_val(vma->vm_page_prot));
		put_page(old);
	}
	mmap_read_unlock(am->mm);
	if (ret == 1)
		return new;
	__free_page(new);
	return ERR_PTR(ret < 0 ? ret : -EFAULT);
}

static void free_copy(struct page *page)
{
	if (page)
		put_page(page);
}

/* Puts @new in the place of what the generation saw at @addr; no CPU sees the old one afterwards. */
static int replace(struct asgen_mm *am, struct asgen *ag, unsigned long addr, struct page *new)
{
	struct page *old;
	int ret = asgen_own_path(am, ag, addr);

	if (ret)
		return ret;
	old = xa_store(&ag->pages, addr >> PAGE_SHIFT, new, GFP_KERNEL_ACCOUNT);
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

static long write_in_page(struct asgen_mm *am, struct asgen *ag, unsigned long addr, const void *bytes,
			  const void __user *user, size_t length)
{
	struct page *new = copy_page_at(am, ag, addr & PAGE_MASK);
	void *to;
	long ret = 0;

	if (IS_ERR(new))
		return PTR_ERR(new);
	to = page_address(new) + offset_in_page(addr);
	if (bytes)
		memcpy(to, bytes, length);
	else if (copy_from_user(to, user, length))
		ret = -EFAULT;
	if (!ret)
		ret = replace(am, ag, addr & PAGE_MASK, new);
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
		int ret = xa_err(xa_store(&to->pages, index, page, GFP_KERNEL_ACCOUNT));

		if (ret)
			return ret;
		get_page(page);
		to->nr_pages++;
		ret = asgen_own_path(to->mm->asgen, to, index << PAGE_SHIFT);
		if (ret)
			return ret;
	}
	return 0;
}

int asgen_pages_to_base(struct asgen_mm *am, struct asgen *ag)
{
	struct page *page;
	unsigned long index;

	xa_for_each(&ag->pages, index, page)
		if (access_remote_vm(am->mm, index << PAGE_SHIFT, page_address(page), PAGE_SIZE,
				     FOLL_FORCE | FOLL_WRITE) != PAGE_SIZE)
			return -EFAULT;
	return 0;
}

void asgen_free_pages(struct asgen *ag)
{
	struct page *page;
	unsigned long index;

	xa_for_each(&ag->pages, index, page)
		free_copy(page);
	xa_destroy(&ag->pages);
}
