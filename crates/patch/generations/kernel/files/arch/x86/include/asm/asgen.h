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
	if (!static_branch_unlikely(&asgen_used))
		return;
	this_cpu_write(asgen_next, NULL);
	if (unlikely(task && task->asgen))
		__asgen_choose(next, task);
}

/* Other tables are about to be loaded, whether or not of the same mm. */
static inline bool asgen_changes(void)
{
	return static_branch_unlikely(&asgen_used) &&
	       this_cpu_read(asgen_next) != this_cpu_read(asgen_loaded);
}

static inline void asgen_changed(void)
{
	if (static_branch_unlikely(&asgen_used))
		this_cpu_write(asgen_loaded, this_cpu_read(asgen_next));
}

/* What is about to be loaded. */
static inline struct asgen *asgen_going(void)
{
	return static_branch_unlikely(&asgen_used) ? this_cpu_read(asgen_next) : NULL;
}

/* What is loaded. */
static inline struct asgen *asgen_there(void)
{
	return static_branch_unlikely(&asgen_used) ? this_cpu_read(asgen_loaded) : NULL;
}

static inline u64 asgen_next_context(struct mm_struct *mm)
{
	struct asgen *ag = asgen_going();

	return unlikely(ag) ? asgen_context(ag) : mm->context.ctx_id;
}

static inline pgd_t *asgen_next_tables(struct mm_struct *mm)
{
	struct asgen *ag = asgen_going();

	return unlikely(ag) ? asgen_tables(ag) : mm->pgd;
}

static inline u64 asgen_loaded_context(struct mm_struct *mm)
{
	struct asgen *ag = asgen_there();

	return unlikely(ag) ? asgen_context(ag) : mm->context.ctx_id;
}

static inline pgd_t *asgen_loaded_tables(struct mm_struct *mm)
{
	struct asgen *ag = asgen_there();

	return unlikely(ag) ? asgen_tables(ag) : mm->pgd;
}

bool __asgen_apart(void);
bool __asgen_leaves(void);

/*
 * A process that runs on many CPUs may have a global TLB context (INVLPGB): one
 * number on all of them, flushed everywhere by an instruction. Nobody is
 * interrupted then, and contexts of generations would keep what they hold. So
 * an mm that has generations uses none. What it was given before stays its own
 * until it ends, and CPUs leave it one by one, when they next switch or flush:
 *
 *	who flushes:	change; count; sees no generations --> flushes the global context
 *				       sees them --> interrupts: who is in the global context leaves it
 *	who leaves:	sees generations; reads the count; flushes its own context if that is behind
 *
 * Who saw none had counted before there were any: who leaves sees that count.
 */
static inline bool asgen_apart(struct mm_struct *mm)
{
	return asgen_of(mm) && __asgen_apart();
}

static inline bool asgen_leaves(struct mm_struct *mm)
{
	return asgen_of(mm) && __asgen_leaves();
}

/* The count as it is after generations were looked for; @before was read earlier. */
static inline u64 asgen_tlb_gen(struct mm_struct *mm, u64 before)
{
	return asgen_of(mm) ? atomic64_read(&mm->context.tlb_gen) : before;
}

#ifdef CONFIG_BROADCAST_TLB_FLUSH
/* What the mm was given, whether or not it uses it: a flush that has begun goes on there. */
#define asgen_given_asid(mm)		READ_ONCE((mm)->context.global_asid)
#else
#define asgen_given_asid(mm)		0
#endif

void __asgen_map_ldt(struct mm_struct *mm);

/* The table that the segments of a process are mapped by is its own, though it stands in the kernel's half. */
static inline void asgen_map_ldt(struct mm_struct *mm)
{
	if (asgen_of(mm))
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
#define asgen_apart(mm)			false
#define asgen_leaves(mm)		false
#define asgen_tlb_gen(mm, before)	(before)
#define asgen_given_asid(mm)		mm_global_asid(mm)

#endif
#endif
