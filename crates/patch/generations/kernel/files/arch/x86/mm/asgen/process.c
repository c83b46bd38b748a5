// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: of a process, from its first call to its end.
 */
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/uprobes.h>

#include "asgen.h"

static void reap(struct work_struct *work)
{
	struct asgen_mm *am = container_of(work, struct asgen_mm, reaper);
	struct asgen *ag, *next;
	LIST_HEAD(gone);

	spin_lock_irq(&am->lock);
	list_for_each_entry_safe(ag, next, &am->generations, list)
		if (!refcount_read(&ag->refs))
			list_move(&ag->list, &gone);
	spin_unlock_irq(&am->lock);
	if (list_empty(&gone))
		return;
	asgen_reload_all(am->mm);
	list_for_each_entry_safe(ag, next, &gone, list)
		asgen_free(ag);
}

DEFINE_STATIC_KEY_FALSE(asgen_used);

/* The process may have generations from here on. */
struct asgen_mm *asgen_register(struct mm_struct *mm)
{
	struct asgen_mm *am = kzalloc(sizeof(*am), GFP_KERNEL_ACCOUNT);
	struct asgen_mm *other;

	if (!am)
		return ERR_PTR(-ENOMEM);
	am->mm = mm;
	mutex_init(&am->change);
	mutex_init(&am->probing);
	spin_lock_init(&am->lock);
	INIT_LIST_HEAD(&am->generations);
	INIT_WORK(&am->reaper, reap);
	/* A child's process has its parent's for an example: there it is on. */
	if (!static_branch_likely(&asgen_used))
		static_branch_enable(&asgen_used);
	other = cmpxchg(&mm->asgen, NULL, am);
	if (other) {
		kfree(am);
		return other;
	}
	/*
	 * Another CPU may have found no overlays to drop copies from, and not
	 * yet made its change to the base visible.
	 */
	kick_all_cpus_sync();
	return am;
}

static void enter_as_child(struct task_struct *child, struct asgen *ag)
{
	refcount_inc(&ag->refs);
	atomic_inc(&ag->threads);
	child->asgen = ag;
}

/*
 * Before the mm is copied: a commit in between changes the base and takes the
 * parent there, but the copy may be of the base as it was.
 */
void __asgen_born(struct task_struct *child)
{
	struct asgen_mm *am = current->mm->asgen;

	spin_lock_irq(&am->lock);
	if (current->asgen)
		enter_as_child(child, current->asgen);
	spin_unlock_irq(&am->lock);
}

/* A new process: its mm is a copy, its only generation that of the calling thread, by the same number. */
int __asgen_fork(struct task_struct *child, struct mm_struct *mm)
{
	struct asgen_mm *am = asgen_register(mm), *parent = current->mm->asgen;
	struct asgen *like = child->asgen, *ag;

	if (IS_ERR(am)) {
		__asgen_leave(child);
		return PTR_ERR(am);
	}
	mutex_lock(&parent->change);
	am->nr_ranges = parent->nr_ranges;
	memcpy(am->ranges, parent->ranges, sizeof(am->ranges));
	/* Whoever takes a probe away finds it in both, or in none. */
	uprobe_start_dup_mmap();
	ag = asgen_new(am, like, like->id);
	uprobe_end_dup_mmap();
	/* Half a commit may be in the child's base: it has to make one of its own first. */
	if (!IS_ERR(ag) && (like == parent->committing || like->deleted))
		am->committing = ag;
	mutex_unlock(&parent->change);
	__asgen_leave(child);
	if (IS_ERR(ag))
		return PTR_ERR(ag);
	ag->entered = true;
	enter_as_child(child, ag);
	return 0;
}

/* No task runs it any more; idle CPUs may have tables of it loaded, and reclaim may still flush it. */
void __asgen_mm_exit(struct mm_struct *mm)
{
	struct asgen_mm *am = mm->asgen;
	struct asgen *ag, *next;
	LIST_HEAD(all);

	cancel_work_sync(&am->reaper);
	spin_lock_irq(&am->lock);
	list_splice_init(&am->generations, &all);
	spin_unlock_irq(&am->lock);
	asgen_reload_all(mm);
	list_for_each_entry_safe(ag, next, &all, list) {
		WARN_ON_ONCE(atomic_read(&ag->threads));
		asgen_free(ag);
	}
}

void __asgen_mm_free(struct mm_struct *mm)
{
	kfree(mm->asgen);
	mm->asgen = NULL;
}
