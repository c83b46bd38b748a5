// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: who looks up pages, instead of having the CPU look.
 *
 * Debuggers look at a thread, not at an address space: they see, and change,
 * what that thread sees. System calls that take pages see what their caller
 * sees; writing is for the base, where such pages are read-only.
 */
#include <linux/mm.h>
#include <linux/pid.h>
#include <linux/sched/task.h>

#include "asgen.h"

struct page *__asgen_page_here(struct mm_struct *mm, unsigned long addr, unsigned int gup_flags)
{
	struct page *page;
	struct asgen *ag;

	if (gup_flags & FOLL_WRITE)
		return NULL;
	ag = asgen_get_of(mm->asgen, current);
	if (!ag)
		return NULL;
	page = asgen_get_page(ag, addr);
	asgen_put(ag);
	return page;
}

static int write_here(struct asgen_mm *am, struct asgen *ag, unsigned long addr, void *buf, int len,
		      unsigned int gup_flags)
{
	int ret;

	/* Such pages are read-only to the process itself. */
	if (!(gup_flags & FOLL_FORCE) || mutex_lock_killable(&am->change))
		return 0;
	/* What is being committed stays as it is. */
	ret = ag == am->committing ? -EBUSY : asgen_change(am, ag, addr, buf, len);
	mutex_unlock(&am->change);
	return ret ? 0 : len;
}

static int access_here(struct asgen_mm *am, struct asgen *ag, unsigned long addr, void *buf, int len,
		       unsigned int gup_flags)
{
	struct page *page = asgen_get_page(ag, addr);

	if (!page)
		return access_remote_vm(am->mm, addr, buf, len, gup_flags);
	if (gup_flags & FOLL_WRITE)
		len = write_here(am, ag, addr, buf, len, gup_flags);
	else
		memcpy(buf, page_address(page) + offset_in_page(addr), len);
	put_page(page);
	return len;
}

int asgen_access_vm(struct task_struct *task, struct mm_struct *mm, unsigned long addr, void *buf, int len,
		    unsigned int gup_flags)
{
	struct asgen_mm *am = READ_ONCE(mm->asgen);
	struct asgen *ag = am && task ? asgen_get_of(am, task) : NULL;
	int done = 0;

	if (!ag)
		return access_remote_vm(mm, addr, buf, len, gup_flags);
	while (done < len) {
		int part = min_t(int, len - done, PAGE_SIZE - offset_in_page(addr + done));
		int ret = access_here(am, ag, addr + done, buf + done, part, gup_flags);

		done += ret;
		if (ret < part)
			break;
	}
	asgen_put(ag);
	return done;
}

int asgen_access_pid(struct pid *pid, struct mm_struct *mm, unsigned long addr, void *buf, int len,
		     unsigned int gup_flags)
{
	struct task_struct *task = get_pid_task(pid, PIDTYPE_PID);
	int done = asgen_access_vm(task, mm, addr, buf, len, gup_flags);

	if (task)
		put_task_struct(task);
	return done;
}
