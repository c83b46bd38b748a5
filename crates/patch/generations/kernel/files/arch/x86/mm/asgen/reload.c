// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: which tables a CPU walks.
 */
#include <linux/smp.h>
#include <asm/asgen.h>
#include <asm/mmu_context.h>
#include <asm/tlbflush.h>

#include "asgen.h"

/* Whose tables switch_mm_irqs_off() is about to load, and whose are. */
DEFINE_PER_CPU(struct asgen *, asgen_next);
DEFINE_PER_CPU(struct asgen *, asgen_loaded);

/* A task may be on its way to another mm than its own: its generation is none of that one's. */
void __asgen_choose(struct mm_struct *next, struct task_struct *task)
{
	struct asgen *ag = READ_ONCE(task->asgen);

	if (ag && ag->mm == next)
		this_cpu_write(asgen_next, ag);
}

u64 asgen_context(struct asgen *ag)
{
	return asgen_holds(ASGEN_RULE_ASID) ? ag->ctx_id : ag->mm->context.ctx_id;
}

pgd_t *asgen_tables(struct asgen *ag)
{
	return ag->pgd;
}

bool __asgen_apart(void)
{
	return asgen_holds(ASGEN_RULE_GLOBAL);
}

bool __asgen_leaves(void)
{
	return asgen_holds(ASGEN_RULE_GLOBAL) && asgen_holds(ASGEN_RULE_LEAVE);
}

u64 asgen_new_context(void)
{
	return atomic64_inc_return(&last_mm_ctx_id);
}

/* For tests of the tests: as if what the TLB holds of the context to be loaded had been flushed like that of the loaded one. */
static void pretend_flushed(struct mm_struct *mm)
{
	u64 context = current->asgen ? asgen_context(current->asgen) : mm->context.ctx_id;
	int asid;

	for (asid = 0; asid < TLB_NR_DYN_ASIDS; asid++)
		if (this_cpu_read(cpu_tlbstate.ctxs[asid].ctx_id) == context)
			this_cpu_write(cpu_tlbstate.ctxs[asid].tlb_gen, atomic64_read(&mm->context.tlb_gen));
}

/* Loads what the current task is to see; interrupts are off. */
void asgen_load(struct mm_struct *mm)
{
	if (!asgen_holds(ASGEN_RULE_BEHIND))
		pretend_flushed(mm);
	switch_mm_irqs_off(NULL, mm, current);
}

static void reload(void *info)
{
	struct mm_struct *mm = info;

	if (this_cpu_read(cpu_tlbstate.loaded_mm) != mm)
		return;
	if (this_cpu_read(cpu_tlbstate_shared.is_lazy) || current->mm != mm)
		switch_mm_irqs_off(NULL, &init_mm, NULL);
	else
		asgen_load(mm);
}

/* Afterwards no CPU has any tables loaded but those that its task is to see. */
void asgen_reload_all(struct mm_struct *mm)
{
	on_each_cpu(reload, mm, 1);
}
