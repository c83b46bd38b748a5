// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: asgen(2).
 */
#include <linux/sched/mm.h>
#include <linux/syscalls.h>
#include <linux/uaccess.h>

#include "asgen.h"

static long status(struct asgen_mm *am, int id, void __user *to, size_t size)
{
	struct asgen_status status = {};
	struct asgen *ag = NULL;

	if (size != sizeof(status))
		return -EINVAL;
	if (am) {
		spin_lock_irq(&am->lock);
		list_for_each_entry(ag, &am->generations, list)
			status.generations++;
		ag = asgen_find(am, id);
		if (ag) {
			status.threads = atomic_read(&ag->threads);
			status.tables = ag->nr_tables;
			status.pages = ag->nr_pages;
		}
		status.current_generation = current->asgen ? current->asgen->id : 0;
		status.fills = am->fills;
		status.drops = am->drops;
		spin_unlock_irq(&am->lock);
	}
	if (id && !ag)
		return -ESRCH;
	return copy_to_user(to, &status, sizeof(status)) ? -EFAULT : 0;
}

static long write_to(struct asgen_mm *am, int id, void __user *from, size_t size)
{
	struct asgen_write write;
	struct asgen *ag;

	if (size != sizeof(write))
		return -EINVAL;
	if (copy_from_user(&write, from, sizeof(write)))
		return -EFAULT;
	spin_lock_irq(&am->lock);
	ag = asgen_find(am, id);
	spin_unlock_irq(&am->lock);
	if (!ag)
		return -ESRCH;
	/* Being committed: part of it is in the base already. */
	if (ag == am->committing)
		return -EBUSY;
	return asgen_write(am, ag, &write);
}

/* Whatever changes generations or where they may be; one after another. */
static long change(struct asgen_mm *am, unsigned int op, int id, void __user *arg, size_t size)
{
	switch (op) {
	case ASGEN_PIN:
		return size % sizeof(struct asgen_range) ? -EINVAL :
			asgen_pin(am, arg, size / sizeof(struct asgen_range));
	case ASGEN_CREATE:
		return asgen_create(am, id);
	case ASGEN_WRITE:
		return write_to(am, id, arg, size);
	case ASGEN_COMMIT:
		return asgen_commit(am, id, false);
	case ASGEN_COMMIT_WHEREVER:
		return asgen_commit(am, id, true);
	case ASGEN_DELETE:
		return asgen_delete(am, id);
	default:
		return -EINVAL;
	}
}

SYSCALL_DEFINE4(asgen, unsigned int, op, int, id, void __user *, arg, size_t, size)
{
	struct mm_struct *mm = current->mm;
	struct asgen_mm *am;
	long ret;

	/* A thread of the kernel's may run with a process's mm and still is none of its threads. */
	if (!mm || (current->flags & PF_KTHREAD))
		return -EINVAL;
	am = READ_ONCE(mm->asgen);
	if (op == ASGEN_MIGRATE)
		return am ? asgen_migrate(am, id) : id ? -ESRCH : 0;
	if (op == ASGEN_STATUS)
		return status(am, id, arg, size);
	if (op > ASGEN_COMMIT_WHEREVER || id < 0)
		return -EINVAL;
	if (!am && op != ASGEN_REGISTER && op != ASGEN_PIN && op != ASGEN_CREATE)
		return -ESRCH;
	if (!am)
		am = asgen_register(mm);
	if (IS_ERR(am))
		return PTR_ERR(am);
	if (op == ASGEN_REGISTER)
		return 0;
	if (mutex_lock_killable(&am->change))
		return -EINTR;
	ret = change(am, op, id, arg, size);
	mutex_unlock(&am->change);
	return ret;
}
