/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Address-space generations: what the rest of the kernel calls.
 *
 * A generation is an overlay of page tables over those of an mm (its "base").
 * To the rest of the kernel an overlay is one more level of TLB: filled from
 * the base in the page fault, dropped wherever the TLB is flushed. Nobody else
 * has to know of it.
 */
#ifndef _LINUX_ASGEN_H
#define _LINUX_ASGEN_H

#include <linux/jump_label.h>
#include <linux/types.h>
#include <linux/sched.h>
#include <linux/mm_types.h>

struct asgen;
struct seq_file;
struct pid_namespace;
struct pid;

#ifdef CONFIG_ASGEN

/* A process has had generations since the machine started: until then what is asked all the time is not even asked. */
DECLARE_STATIC_KEY_FALSE(asgen_used);

bool __asgen_fault(struct mm_struct *mm, unsigned long addr);
void __asgen_flush(struct mm_struct *mm, unsigned long start, unsigned long end, bool tables);
void __asgen_flush_later(struct mm_struct *mm, unsigned long start, unsigned long end);
void __asgen_forget(struct mm_struct *mm, unsigned long addr, unsigned long size);
void __asgen_born(struct task_struct *child);
int __asgen_fork(struct task_struct *child, struct mm_struct *mm);
void __asgen_leave(struct task_struct *task);
void __asgen_mm_exit(struct mm_struct *mm);
void __asgen_mm_free(struct mm_struct *mm);
int asgen_access_vm(struct task_struct *task, struct mm_struct *mm, unsigned long addr,
		    void *buf, int len, unsigned int gup_flags);
int asgen_access_pid(struct pid *pid, struct mm_struct *mm, unsigned long addr,
		     void *buf, int len, unsigned int gup_flags);
struct page *__asgen_page_here(struct mm_struct *mm, unsigned long addr, unsigned int gup_flags);
int asgen_proc_generations(struct seq_file *m, struct pid_namespace *ns, struct pid *pid,
			   struct task_struct *task);
int asgen_proc_generation(struct seq_file *m, struct pid_namespace *ns, struct pid *pid,
			  struct task_struct *task);
void __asgen_probe(struct mm_struct *mm, unsigned long at, const u8 *insn, bool set);
void asgen_each_probe(struct vm_area_struct *vma, unsigned long page,
		      void (*each)(void *argument, unsigned long at, const u8 *insn), void *argument);
pgd_t *asgen_pgd_alloc(struct mm_struct *mm);
void asgen_pgd_free(struct mm_struct *mm, pgd_t *pgd);

/* Does the current thread see anything but the base? */
static __always_inline bool asgen_here(void)
{
	return static_branch_unlikely(&asgen_used) && unlikely(current->asgen);
}

/* May this mm have overlays? */
static __always_inline bool asgen_of(struct mm_struct *mm)
{
	return static_branch_unlikely(&asgen_used) && unlikely(READ_ONCE(mm->asgen));
}

/* Did the current thread's overlay lack what the base has? Then the access may be tried again. */
static __always_inline bool asgen_fault(struct mm_struct *mm, unsigned long addr)
{
	return asgen_here() && mm == current->mm && __asgen_fault(mm, addr);
}

/* Before the TLB is flushed: entries of the base in [start, end) were taken away or changed. */
static __always_inline void asgen_flush(struct mm_struct *mm, unsigned long start,
					unsigned long end, bool tables)
{
	if (asgen_of(mm))
		__asgen_flush(mm, start, end, tables);
}

/* The same, for pages whose flush is put off. */
static __always_inline void asgen_flush_later(struct mm_struct *mm, unsigned long start,
					      unsigned long end)
{
	if (asgen_of(mm))
		__asgen_flush_later(mm, start, end);
}

/* The accessed bit at @addr was cleared: an access through an overlay must set it again. */
static __always_inline void asgen_forget(struct mm_struct *mm, unsigned long addr,
					 unsigned long size)
{
	if (asgen_of(mm))
		__asgen_forget(mm, addr, size);
}

/* A probe of the instruction @insn was set at @at in the base, or is about to be taken away; mmap_lock is held. */
static inline void asgen_probe(struct mm_struct *mm, unsigned long at, const u8 *insn, bool set)
{
	if (asgen_of(mm))
		__asgen_probe(mm, at, insn, set);
}

/*
 * clone() and fork(): @child begins in the generation of the current thread.
 * Workers of the kernel (io_uring's) run nothing of the process's: they stay in
 * the base, and nobody waits for them.
 */
static inline void asgen_born(struct task_struct *child)
{
	child->asgen = NULL;
	if (unlikely(current->asgen) && !(child->flags & PF_USER_WORKER))
		__asgen_born(child);
}

/* fork(): in a copy of that one, for the copy of the mm. */
static inline int asgen_fork(struct task_struct *child, struct mm_struct *mm)
{
	return unlikely(child->asgen) && mm != current->mm ? __asgen_fork(child, mm) : 0;
}

/* The page that it sees at @addr, with a reference, if that is not the base's. */
static inline struct page *asgen_page_here(struct mm_struct *mm, unsigned long addr, unsigned int gup_flags)
{
	return asgen_here() && mm == current->mm ? __asgen_page_here(mm, addr, gup_flags) : NULL;
}

/* The task runs nothing more of this mm: it exits, executes, or was never born. */
static inline void asgen_leave(struct task_struct *task)
{
	if (unlikely(task->asgen))
		__asgen_leave(task);
}

/* The mm's last user is gone. */
static inline void asgen_mm_exit(struct mm_struct *mm)
{
	if (unlikely(mm->asgen))
		__asgen_mm_exit(mm);
}

/* Its mappings are gone as well: nobody finds it any more to flush it. */
static inline void asgen_mm_free(struct mm_struct *mm)
{
	if (unlikely(mm->asgen))
		__asgen_mm_free(mm);
}

#define asgen_init_mm(mm)	((mm)->asgen = NULL)

#else

#define asgen_fault(mm, addr)			false
#define asgen_flush(mm, start, end, tables)	do { } while (0)
#define asgen_flush_later(mm, start, end)	do { } while (0)
#define asgen_forget(mm, addr, size)		do { } while (0)
#define asgen_probe(mm, at, insn, set)		do { } while (0)
#define asgen_born(child)			do { } while (0)
#define asgen_fork(child, mm)			0
#define asgen_here()				false
#define asgen_page_here(mm, addr, flags)	((struct page *)NULL)
#define asgen_leave(task)			do { } while (0)
#define asgen_mm_exit(mm)			do { } while (0)
#define asgen_mm_free(mm)			do { } while (0)
#define asgen_init_mm(mm)			do { } while (0)
#define asgen_access_vm(task, mm, addr, buf, len, flags) \
	access_remote_vm(mm, addr, buf, len, flags)
#define asgen_access_pid(pid, mm, addr, buf, len, flags) \
	access_remote_vm(mm, addr, buf, len, flags)

#endif
#endif
