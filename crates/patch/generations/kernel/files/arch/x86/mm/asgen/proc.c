// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: /proc/PID/generations, a line for each, and
 * /proc/PID/task/TID/generation, the number of the one that a thread is in.
 */
#include <linux/proc_fs.h>
#include <linux/ptrace.h>
#include <linux/sched/mm.h>
#include <linux/seq_file.h>

#include "asgen.h"

static struct mm_struct *look_at(struct task_struct *task)
{
	struct mm_struct *mm = mm_access(task, PTRACE_MODE_READ_FSCREDS);

	return mm ?: ERR_PTR(-ESRCH);
}

int asgen_proc_generations(struct seq_file *m, struct pid_namespace *ns, struct pid *pid, struct task_struct *task)
{
	struct mm_struct *mm = look_at(task);
	struct asgen_mm *am;
	struct asgen *ag;

	if (IS_ERR(mm))
		return PTR_ERR(mm);
	am = READ_ONCE(mm->asgen);
	if (am) {
		seq_puts(m, "generation state threads pages tables\n");
		spin_lock_irq(&am->lock);
		list_for_each_entry_reverse(ag, &am->generations, list)
			seq_printf(m, "%d %s %d %lu %u\n", ag->id,
				   ag->deleted ? "deleted" : ag == am->committing ? "committing" : "known",
				   atomic_read(&ag->threads), ag->nr_pages, ag->nr_tables);
		spin_unlock_irq(&am->lock);
	}
	mmput(mm);
	return 0;
}

int asgen_proc_generation(struct seq_file *m, struct pid_namespace *ns, struct pid *pid, struct task_struct *task)
{
	struct mm_struct *mm = look_at(task);
	struct asgen *ag = NULL;
	int ret = 0;

	if (IS_ERR(mm))
		return PTR_ERR(mm);
	if (READ_ONCE(mm->asgen))
		ag = asgen_get_of(mm->asgen, task);
	/* One that ends has left its generation, but still has the mm for a while: it is nowhere any more. */
	if (!ag && (READ_ONCE(task->flags) & PF_EXITING))
		ret = -ESRCH;
	else
		seq_printf(m, "%d\n", ag ? ag->id : 0);
	if (ag)
		asgen_put(ag);
	mmput(mm);
	return ret;
}
