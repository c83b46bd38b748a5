//! Stack walks of one process: they decide if the conservative scan stays busy because of a stale word, and explain the result.

use crate::image::{section, unwind_sections};
use crate::ledger::Span;
use crate::probe::{ThreadSnapshot, Verdict};
use crate::scan::{Finding, Forbidden};
use std::sync::OnceLock;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Module, Process};
use stillpoint_patch_unwind as unwind;

/// Walker over the mapped modules. It locates unwind data at first use, never while a thread is stopped; each page of the data itself is
/// read when a walk needs it.
pub(crate) struct Walker<'p> {
    process: &'p Process,
    modules: Vec<Module>,
    patches: Vec<Span>,
    unwinder: OnceLock<unwind::Unwinder<'p>>,
}

/// Address of a frame, and true if the thread is stopped there, false if it will return there.
pub(crate) type FrameAddress = (Avma, bool);

impl<'p> Walker<'p> {
    /// Makes a walker; `patches` holds the locations of the patches' unwind data.
    pub(crate) fn new(process: &'p Process, modules: Vec<Module>, patches: Vec<Span>) -> Self {
        Walker { process, modules, patches, unwinder: OnceLock::new() }
    }

    /// Locates the unwind data now.
    pub(crate) fn prepare(&self) -> &unwind::Unwinder<'p> {
        self.unwinder.get_or_init(|| {
            let memory = self.process.memory();
            let section = |span| section(memory, span);
            let mapped = self.modules.iter().filter_map(|m| unwind_sections(memory, m).ok().flatten());
            let mapped = mapped.map(|(hdr, eh_frame)| (Some(hdr), eh_frame));
            let all = mapped.chain(self.patches.iter().map(|span| (None, *span)));
            let module = |(hdr, eh_frame): (Option<Span>, Span)| unwind::Module {
                eh_frame: section(eh_frame),
                eh_frame_hdr: hdr.map(section),
            };
            unwind::Unwinder::new(all.map(module).collect())
        })
    }

    fn walk(&self, snapshot: &ThreadSnapshot<'_>) -> Option<unwind::Walk> {
        let unwinder = self.unwinder.get()?;
        let r = &snapshot.registers;
        let general = [
            r.rax, r.rdx, r.rcx, r.rbx, r.rsi, r.rdi, r.rbp, r.rsp, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14,
            r.r15,
        ];
        let read = |at: u64| {
            let offset = at.checked_sub(snapshot.base.0).filter(|o| o + 8 <= snapshot.stack.len() as u64);
            match offset {
                Some(offset) if snapshot.one_piece => {
                    snapshot.stack[offset as usize..][..8].try_into().ok().map(u64::from_le_bytes)
                }
                _ => self.process.memory().read_u64(Avma(at)).ok(),
            }
        };
        Some(unwinder.walk(unwind::Registers { pc: r.rip, general }, read))
    }

    /// Returns the verdict on a stopped thread, by means of the unwind data that has been located.
    pub(crate) fn judge(&self, snapshot: &ThreadSnapshot<'_>, forbidden: &Forbidden) -> Verdict {
        self.confirm(snapshot.verdict(forbidden), snapshot, forbidden)
    }

    /// Removes a finding if a complete stack walk shows that it is a stale word.
    pub(crate) fn confirm(&self, verdict: Verdict, snapshot: &ThreadSnapshot<'_>, forbidden: &Forbidden) -> Verdict {
        let frames = if verdict.may_be_stale() { self.frames(snapshot) } else { None };
        let Some(frames) = frames else { return verdict };
        let hit = |(address, executing): &FrameAddress| {
            let name = forbidden.frame(*address, *executing)?;
            Some(Finding { name: name.clone(), address: *address, executing: *executing })
        };
        frames.iter().find_map(hit).map_or(Verdict::Clear, Verdict::Busy)
    }

    /// Returns all frames of a thread, if the walk proves that there are no others.
    fn frames(&self, snapshot: &ThreadSnapshot<'_>) -> Option<Vec<FrameAddress>> {
        let walk = self.walk(snapshot)?;
        walk.is_complete().then(|| walk.frames.iter().map(|f| (Avma(f.address), f.executing)).collect())
    }
}
