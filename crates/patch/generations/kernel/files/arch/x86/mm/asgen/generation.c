// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: their life.
 *
 *	create --> [known] --delete--> [deleted] --last thread leaves--> reaped
 *	              |                                                    ^
 *	              +--commit: pages to the base, threads to the base ---+
 *
 * A thread holds a reference to the generation that it is in. What has no
 * reference left is freed by the reaper, after every CPU has let go of its
 * tables: idle ones may still have them loaded.
 */
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "asgen.h"

/* The lock is held. */
struct asgen *asgen_find(struct asgen_mm *am, int id)
{
	struct asgen *ag;

	lockdep_assert_held(&am->lock);
	list_for_each_entry(ag, &am->generations, list)
		if (ag->id == id && !ag->deleted)
			return ag;
	return NULL;
}

static struct asgen *get(struct asgen_mm *am, int id)
{
	struct asgen *ag;

	spin_lock_irq(&am->lock);
	ag = asgen_find(am, id);
	if (ag)
		refcount_inc(&ag->refs);
	spin_unlock_irq(&am->lock);
	return ag;
}

/* The generation that another task is in, if that is of this mm. */
struct asgen *asgen_get_of(struct asgen_mm *am, struct task_struct *task)
{
	struct asgen *ag;

	spin_lock_irq(&am->lock);
	/* One of another mm may be gone by now: it is only compared. */
	list_for_each_entry(ag, &am->generations, list)
		if (ag == READ_ONCE(task->asgen) && refcount_inc_not_zero(&ag->refs))
			goto out;
	ag = NULL;
out:
	spin_unlock_irq(&am->lock);
	return ag;
}

void asgen_put(struct asgen *ag)
{
	struct mm_struct *mm = ag->mm;

	if (refcount_dec_and_test(&ag->refs))
		schedule_work(&mm->asgen->reaper);
}

static void list_new(struct asgen_mm *am, struct asgen *ag, int id)
{
	spin_lock_irq(&am->lock);
	ag->id = id ?: am->last_id + 1;
	am->last_id = max(am->last_id, ag->id);
	list_add(&ag->list, &am->generations);
	asgen_copy_ldt(ag);
	spin_unlock_irq(&am->lock);
}

struct asgen *asgen_new(struct asgen_mm *am, struct asgen *like, int id)
{
	struct asgen *ag = kzalloc(sizeof(*ag), GFP_KERNEL_ACCOUNT);
	bool writing = false;
	int ret;

	if (!ag)
		return ERR_PTR(-ENOMEM);
	INIT_LIST_HEAD(&ag->tables);
	xa_init(&ag->pages);
	refcount_set(&ag->refs, 1);
	ag->mm = am->mm;
	ag->ctx_id = asgen_new_context();
	ag->pgd = asgen_pgd_alloc(am->mm);
	ret = ag->pgd ? 0 : -ENOMEM;
	/* Whoever takes a probe away finds the pages either there, or here too. */
	if (like)
		writing = asgen_hold_probes(like->mm);
	if (!ret && like)
		ret = asgen_share_pages(ag, like);
	if (!ret)
		list_new(am, ag, id);
	if (like)
		asgen_release_probes(like->mm, writing);
	if (ret) {
		asgen_free(ag);
		return ERR_PTR(ret);
	}
	return ag;
}

int asgen_create(struct asgen_mm *am, int like_id)
{
	struct asgen *like = NULL, *ag;

	if (am->last_id == INT_MAX)
		return -EOVERFLOW;
	if (like_id) {
		like = get(am, like_id);
		if (!like)
			return -ESRCH;
	}
	ag = asgen_new(am, like, 0);
	if (like)
		asgen_put(like);
	return PTR_ERR_OR_ZERO(ag) ?: ag->id;
}

/* The current thread runs @ag from here on; the lock is held. */
static struct asgen *enter(struct asgen_mm *am, struct asgen *ag)
{
	struct asgen *old = current->asgen;

	if (ag) {
		refcount_inc(&ag->refs);
		atomic_inc(&ag->threads);
		ag->entered = true;
	}
	WRITE_ONCE(current->asgen, ag);
	asgen_load(am->mm);
	if (old)
		atomic_dec(&old->threads);
	return old;
}

/* Waits for nobody but for moments in which the lists are changed. */
int asgen_migrate(struct asgen_mm *am, int id)
{
	struct asgen *ag = NULL, *old = NULL;
	int ret = 0;

	spin_lock_irq(&am->lock);
	if (id)
		ag = asgen_find(am, id);
	if (id && !ag)
		ret = -ESRCH;
	else if (am->committing && ag != am->committing)
		ret = -EBUSY;
	else
		old = enter(am, ag);
	if (old)
		ret = old->id;
	spin_unlock_irq(&am->lock);
	if (old)
		asgen_put(old);
	return ret;
}

/* The task runs nothing more of this mm: it is the current one, or was never born. */
void __asgen_leave(struct task_struct *task)
{
	/* From the current one a commit may take its generation at any moment. */
	struct asgen_mm *am = (task == current ? task->mm : task->asgen->mm)->asgen;
	unsigned long flags;
	struct asgen *ag;

	spin_lock_irqsave(&am->lock, flags);
	if (task == current) {
		ag = enter(am, NULL);
	} else {
		ag = xchg(&task->asgen, NULL);
		if (ag)
			atomic_dec(&ag->threads);
	}
	spin_unlock_irqrestore(&am->lock, flags);
	if (ag)
		asgen_put(ag);
}

static bool somebody_is_elsewhere(struct asgen_mm *am, struct asgen *ag)
{
	struct task_struct *process, *task;
	bool found = false;

	rcu_read_lock();
	for_each_process_thread(process, task)
		found |= READ_ONCE(task->mm) == am->mm && !(task->flags & (PF_EXITING | PF_USER_WORKER)) &&
			 READ_ONCE(task->asgen) != ag;
	rcu_read_unlock();
	return found;
}

static void everybody_to_base(struct asgen_mm *am, struct asgen *ag)
{
	struct task_struct *process, *task;

	rcu_read_lock();
	for_each_process_thread(process, task)
		if (cmpxchg(&task->asgen, ag, NULL) == ag) {
			atomic_dec(&ag->threads);
			/* Not the last: the generation itself holds one. */
			refcount_dec(&ag->refs);
		}
	rcu_read_unlock();
}

static int forget(struct asgen_mm *am, int id)
{
	struct asgen *ag;

	spin_lock_irq(&am->lock);
	ag = asgen_find(am, id);
	if (ag && ag == am->committing)
		ag = ERR_PTR(-EBUSY);
	else if (ag)
		ag->deleted = true;
	if (!IS_ERR_OR_NULL(ag) && !asgen_holds(ASGEN_RULE_REAP))
		everybody_to_base(am, ag);
	spin_unlock_irq(&am->lock);
	if (IS_ERR_OR_NULL(ag))
		return ag ? PTR_ERR(ag) : -ESRCH;
	asgen_put(ag);
	return 0;
}

int asgen_delete(struct asgen_mm *am, int id)
{
	return forget(am, id);
}

/*
 * All threads are in the generation and none may go elsewhere: nobody looks at
 * the base's pages while they change. Afterwards both are the same, and threads
 * may be taken over to the base at any moment. If it fails half-way the base
 * stays out of bounds until a commit succeeds.
 *
 * Or, @wherever they are: then the caller has stopped them, and knows that none
 * of them is in the middle of what changes.
 */
int asgen_commit(struct asgen_mm *am, int id, bool wherever)
{
	struct asgen *ag;
	int ret = 0;

	spin_lock_irq(&am->lock);
	ag = asgen_find(am, id);
	if (!ag) {
		ret = -ESRCH;
	} else if (am->committing && am->committing != ag) {
		ret = -EBUSY;
	} else {
		/* A thread that is being born is in the generation of its parent. */
		if (!wherever && !am->committing && somebody_is_elsewhere(am, ag))
			ret = -EBUSY;
		else
			am->committing = ag;
	}
	spin_unlock_irq(&am->lock);
	if (!ret)
		ret = asgen_pages_to_base(am, ag);
	if (ret)
		return ret;
	spin_lock_irq(&am->lock);
	everybody_to_base(am, ag);
	am->committing = NULL;
	spin_unlock_irq(&am->lock);
	/* All of them: one may be about to load what it has just read. */
	asgen_reload_all(am->mm);
	return forget(am, id);
}

void asgen_free(struct asgen *ag)
{
	asgen_free_tables(ag);
	asgen_free_pages(ag);
	kfree(ag);
}
