/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Address-space generations: which tables of an mm a CPU has loaded. For
 * arch/x86/mm/tlb.c, with interrupts off.
 */
#ifndef _ASM_X86_ASGEN_H
#define _ASM_X86_ASGEN_H

#include <linux/asgen.h>
#include <linux/percpu.h>

#ifdef CONFIG_ASGEN

/* NULL: those of the mm itself. */
DECLARE_PER_CPU(struct asgen *, asgen_next);
DECLARE_PER_CPU(struct asgen *, asgen_loaded);

void __asgen_choose(struct mm_struct *next, struct task_struct *task);
u64 asgen_context(struct asgen *ag);
pgd_t *asgen_tables(struct asgen *ag);

/* Whose tables switch_mm_irqs_off() is about to load. */
static inline void asgen_choose(struct mm_struct *next, struct task_struct *task)
{
	this_cpu_write(asgen_next, NULL);
	if (unlikely(task && task->asgen))
		__asgen_choose(next, task);
}

/* Other tables are about to be loaded, whether or not of the same mm. */
static inline bool asgen_changes(void)
{
	return this_cpu_read(asgen_next) != this_cpu_read(asgen_loaded);
}

static inline void asgen_changed(void)
{
	this_cpu_write(asgen_loaded, this_cpu_read(asgen_next));
}

static inline u64 asgen_next_context(struct mm_struct *mm)
{
	struct asgen *ag = this_cpu_read(asgen_next);

	return unlikely(ag) ? asgen_context(ag) : mm->context.ctx_id;
}

static inline pgd_t *asgen_next_tables(struct mm_struct *mm)
{
	struct asgen *ag = this_cpu_read(asgen_next);

	return unlikely(ag) ? asgen_tables(ag) : mm->pgd;
}

static inline u64 asgen_loaded_context(struct mm_struct *mm)
{
	struct asgen *ag = this_cpu_read(asgen_loaded);

	return unlikely(ag) ? asgen_context(ag) : mm->context.ctx_id;
}

static inline pgd_t *asgen_loaded_tables(struct mm_struct *mm)
{
	struct asgen *ag = this_cpu_read(asgen_loaded);

	return unlikely(ag) ? asgen_tables(ag) : mm->pgd;
}


void __asgen_map_ldt(struct mm_struct *mm);

/* The table that the segments of a process are mapped by is its own, though it stands in the kernel's half. */
static inline void asgen_map_ldt(struct mm_struct *mm)
{
	if (unlikely(mm->asgen))
		__asgen_map_ldt(mm);
}

#else

#define asgen_choose(next, task)	do { } while (0)
#define asgen_changes()			false
#define asgen_changed()			do { } while (0)
#define asgen_next_context(mm)		((mm)->context.ctx_id)
#define asgen_next_tables(mm)		((mm)->pgd)
#define asgen_loaded_context(mm)	((mm)->context.ctx_id)
#define asgen_loaded_tables(mm)		((mm)->pgd)
#define asgen_map_ldt(mm)		do { } while (0)

#endif
#endif
