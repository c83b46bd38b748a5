//! Examination of one stopped thread: its registers, and all used parts of its stack.

use crate::Error;
use crate::scan::{Finding, Forbidden};
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Mapping, Process, Registers, StoppedThread};

/// Largest live stack that is read, in bytes; a thread with more counts as busy.
const STACK_MAX: u64 = 64 << 20;
/// Largest part of an alternate stack that is read, in bytes.
const ALTERNATE_MAX: u64 = 1 << 20;

/// Result of the examination of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No forbidden code is on its stack.
    Clear,
    /// This code may be on its stack.
    Busy(Finding),
    /// It runs on a stack that is neither its own nor a signal handler's: other stacks may hold any frames.
    ForeignStack,
    /// It has no user side.
    KernelWorker,
}

impl Verdict {
    /// Returns true if the thread may migrate.
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Verdict::Clear | Verdict::KernelWorker)
    }

    /// Returns true if the verdict depends on a word of the stack that may be stale.
    pub(crate) fn may_be_stale(&self) -> bool {
        matches!(self, Verdict::Busy(finding) if !finding.executing)
    }

    /// Returns the text for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Verdict::Clear => "no code that is patched".into(),
            Verdict::Busy(finding) => finding.name.to_string(),
            Verdict::ForeignStack => "code on a stack that is not its own".into(),
            Verdict::KernelWorker => "the kernel".into(),
        }
    }
}

/// Buffers reused between threads, so that no memory is allocated while one is stopped.
#[derive(Default)]
pub(crate) struct Prober {
    stack: Vec<u8>,
    /// Ascending; read again if a thread is outside them.
    mappings: Vec<Mapping>,
}

/// Registers of a thread, and the bytes read from the used part of its stack.
pub(crate) struct ThreadSnapshot<'p> {
    pub(crate) registers: Registers,
    pub(crate) fs_base: Avma,
    /// Bytes of the used parts of all its stacks, in words.
    pub(crate) stack: &'p [u8],
    /// Address of the first byte of `stack`.
    pub(crate) base: Avma,
    /// True if other stacks than those read may hold its frames.
    pub(crate) foreign: bool,
    /// True if `stack` is one contiguous piece.
    pub(crate) one_piece: bool,
}

fn mapping_at(mappings: &[Mapping], at: Avma) -> Option<&Mapping> {
    let index = mappings.partition_point(|m| m.start <= at).checked_sub(1)?;
    mappings.get(index).filter(|m| m.contains(at))
}

fn is_main_stack(mapping: &Mapping) -> bool {
    mapping.path.as_deref() == Some("[stack]")
}

/// Returns the end of the stack that contains `sp`, if it is the thread's own: `[stack]`, or the mapping that ends in its control block.
fn own_stack_end(mappings: &[Mapping], sp: Avma, fs_base: Avma) -> Option<Avma> {
    let mapping = mapping_at(mappings, sp)?;
    if is_main_stack(mapping) {
        return Some(mapping.end);
    }
    let own = sp < fs_base && mapping.contains(fs_base) && fs_base.0 - sp.0 <= STACK_MAX;
    own.then_some(fs_base)
}

impl Prober {
    pub(crate) fn new(mappings: Vec<Mapping>) -> Self {
        Prober { stack: vec![0; 1 << 20], mappings }
    }

    /// Reads the registers and the stack of a thread.
    pub(crate) fn snapshot(
        &mut self,
        process: &Process,
        held: &mut StoppedThread<'_>,
    ) -> Result<ThreadSnapshot<'_>, Error> {
        let registers = held.registers()?;
        let fs_base = Avma(registers.fs_base);
        let sp = Avma(registers.rsp & !7);
        if registers.has_no_user_side() {
            return Ok(ThreadSnapshot { registers, fs_base, stack: &[], base: sp, foreign: false, one_piece: true });
        }
        let mut end = own_stack_end(&self.mappings, sp, fs_base);
        if end.is_none() {
            self.mappings = process.mappings()?;
            end = own_stack_end(&self.mappings, sp, fs_base);
        }
        let Some(end) = end else { return self.snapshot_foreign_stack(process, registers) };
        let len = self.read(process, 0, sp, end)?;
        Ok(ThreadSnapshot { registers, fs_base, stack: &self.stack[..len], base: sp, foreign: false, one_piece: true })
    }

    /// Reads a thread that is on another stack than its own. If a signal frame is there, it is a signal handler's stack. Then the whole own
    /// stack counts as well, because the frame holds the interrupted address and is not decoded. Any other stack belongs to a coroutine:
    /// others may be suspended, with frames that cannot be found.
    fn snapshot_foreign_stack(&mut self, process: &Process, registers: Registers) -> Result<ThreadSnapshot<'_>, Error> {
        let (fs_base, base) = (Avma(registers.fs_base), Avma(registers.rsp & !7));
        let end = mapping_at(&self.mappings, base).map_or(base, |m| Avma(m.end.0.min(base.0 + ALTERNATE_MAX)));
        let mut len = self.read(process, 0, base, end)?;
        let words = self.stack[..len].as_chunks::<8>().0;
        // found when the process was opened
        let returns = process.signal_returns()?;
        let signal = words.iter().any(|w| returns.contains(&u64::from_le_bytes(*w)));
        let mut foreign = true;
        if let Some((start, end)) = self.whole_own_stack(fs_base).filter(|_| signal) {
            len += self.read(process, len, start, end)?;
            foreign = false;
        }
        Ok(ThreadSnapshot { registers, fs_base, stack: &self.stack[..len], base, foreign, one_piece: false })
    }

    /// Returns the whole stack that belongs to a control block, used or not. The main thread's control block is in a small mapping or the
    /// heap, where no stack ends.
    fn whole_own_stack(&self, fs_base: Avma) -> Option<(Avma, Avma)> {
        let mapping = mapping_at(&self.mappings, fs_base)?;
        if mapping.len() >= 16 << 10 && mapping.path.is_none() && fs_base.0 - mapping.start.0 >= 16 << 10 {
            return Some((Avma(mapping.start.0.max(fs_base.0.saturating_sub(STACK_MAX))), fs_base));
        }
        let stack = self.mappings.iter().find(|m| is_main_stack(m))?;
        Some((stack.start, stack.end))
    }

    /// Reads `[start, end)` to the buffer after its first `at` bytes.
    fn read(&mut self, process: &Process, at: usize, start: Avma, end: Avma) -> Result<usize, Error> {
        let len = end.0.saturating_sub(start.0).min(STACK_MAX) as usize & !7;
        if self.stack.len() < at + len {
            self.stack.resize(at + len, 0);
        }
        process.memory().read(start, &mut self.stack[at..at + len])?;
        Ok(len)
    }
}

impl ThreadSnapshot<'_> {
    /// Returns the verdict on the registers and stack.
    pub(crate) fn verdict(&self, forbidden: &Forbidden) -> Verdict {
        if self.registers.has_no_user_side() {
            return Verdict::KernelWorker;
        }
        if let Some(finding) = forbidden.find(&self.registers.values(), self.stack) {
            return Verdict::Busy(finding);
        }
        if self.foreign { Verdict::ForeignStack } else { Verdict::Clear }
    }

    /// Returns true if the thread is stopped inside the first bytes of an entry, or one of its signal frames points there.
    pub(crate) fn is_inside(&self, boundaries: &[u64]) -> bool {
        let words = self.stack.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w));
        !boundaries.is_empty()
            && (boundaries.contains(&self.registers.rip) || words.into_iter().any(|w| boundaries.contains(&w)))
    }
}
