// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: where they may differ.
 *
 * Such a range is sealed: nobody can unmap it, move it or change its
 * protection, so pages of generations never outlive the mapping they are in.
 * Ranges are never taken back, as seals are not.
 */
#include <linux/mm.h>
#include <linux/uaccess.h>

#include "asgen.h"

#define FORBIDDEN (VM_WRITE | VM_SHARED | VM_HUGETLB | VM_PFNMAP | VM_MIXEDMAP | VM_IO)

static int check_mappings(struct mm_struct *mm, struct asgen_range *range)
{
	unsigned long addr = range->start;
	struct vm_area_struct *vma;
	VMA_ITERATOR(vmi, mm, addr);

	for_each_vma_range(vmi, vma, range->end) {
		if (vma->vm_start > addr)
			return -ENOMEM;
		if ((vma->vm_flags & FORBIDDEN) || !(vma->vm_flags & VM_READ) || !(vma->vm_flags & VM_SEALED))
			return -EPERM;
		addr = vma->vm_end;
	}
	return addr < range->end ? -ENOMEM : 0;
}

static int pin_one(struct asgen_mm *am, struct asgen_range *range)
{
	int ret;

	if (((range->start | range->end) & ~PAGE_MASK) || range->start >= range->end || range->end > TASK_SIZE)
		return -EINVAL;
	if (asgen_pinned(am, range->start, range->end - range->start))
		return 0;
	if (am->nr_ranges == ASGEN_RANGES_MAX)
		return -ENOSPC;
	mmap_read_lock(am->mm);
	ret = check_mappings(am->mm, range);
	mmap_read_unlock(am->mm);
	if (!ret)
		am->ranges[am->nr_ranges++] = *range;
	return ret;
}

int asgen_pin(struct asgen_mm *am, const struct asgen_range __user *ranges, size_t nr)
{
	unsigned int before = am->nr_ranges;
	struct asgen_range range;
	int ret = 0;

	for (; nr && !ret; nr--, ranges++)
		ret = copy_from_user(&range, ranges, sizeof(range)) ? -EFAULT : pin_one(am, &range);
	if (ret)
		am->nr_ranges = before;
	return ret;
}

/* Whether all of it lies in one range. */
bool asgen_pinned(struct asgen_mm *am, unsigned long start, unsigned long length)
{
	struct asgen_range *range;

	for (range = am->ranges; range < am->ranges + am->nr_ranges; range++)
		if (start >= range->start && start < range->end && length <= range->end - start)
			return true;
	return false;
}
