//! Looking at one thread that stands: its registers, and all of its stack that is in use.

use crate::Error;
use crate::scan::{Finding, Forbidden};
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Held, Mapping, Process, Registers};

/// More live stack than this is not read: the thread counts as busy.
const STACK_MAX: u64 = 64 << 20;
/// An alternate stack is read so far.
const ALTERNATE_MAX: u64 = 1 << 20;

/// What a look at a thread found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing forbidden is on its stack.
    Clear,
    /// This may be.
    Busy(Finding),
    /// It runs on a stack that is not its own and that is not a signal handler's: other stacks may hold anything.
    ForeignStack,
    /// It has no user side.
    KernelWorker,
}

impl Verdict {
    /// Whether nothing keeps the thread where it is.
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Verdict::Clear | Verdict::KernelWorker)
    }

    /// Whether it rests on a word of the stack that may be a stale one.
    pub(crate) fn may_be_stale(&self) -> bool {
        matches!(self, Verdict::Busy(finding) if !finding.standing)
    }

    /// For messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Verdict::Clear => "nothing that is patched".into(),
            Verdict::Busy(finding) => finding.name.to_string(),
            Verdict::ForeignStack => "a stack that is not its own".into(),
            Verdict::KernelWorker => "the kernel".into(),
        }
    }
}

/// Reused between threads, so that nothing is allocated while one stands.
#[derive(Default)]
pub(crate) struct Prober {
    stack: Vec<u8>,
    /// Ascending; read anew when a thread stands outside of them.
    mappings: Vec<Mapping>,
}

/// The stack of a thread in use, and the bytes read of it.
pub(crate) struct Look<'p> {
    pub(crate) registers: Registers,
    pub(crate) fs_base: Avma,
    /// Bytes of all its stacks in use, in words.
    pub(crate) stack: &'p [u8],
    /// Where `stack` begins.
    pub(crate) base: Avma,
    /// Other stacks than those read may hold its frames.
    pub(crate) foreign: bool,
    /// `stack` is one piece.
    pub(crate) one_piece: bool,
}

fn mapping_at(mappings: &[Mapping], at: Avma) -> Option<&Mapping> {
    let index = mappings.partition_point(|m| m.start <= at).checked_sub(1)?;
    mappings.get(index).filter(|m| m.contains(at))
}

fn is_main_stack(mapping: &Mapping) -> bool {
    mapping.path.as_deref() == Some("[stack]")
}

/// The end of the stack that `sp` is in, when that is the thread's own: `[stack]`, or the mapping that ends in its
/// control block.
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

    /// Reads what a thread stands in.
    pub(crate) fn look(&mut self, process: &Process, held: &mut Held<'_>) -> Result<Look<'_>, Error> {
        let registers = held.registers()?;
        let fs_base = Avma(registers.fs_base);
        let sp = Avma(registers.rsp & !7);
        if registers.no_user_side() {
            return Ok(Look { registers, fs_base, stack: &[], base: sp, foreign: false, one_piece: true });
        }
        let mut end = own_stack_end(&self.mappings, sp, fs_base);
        if end.is_none() {
            self.mappings = process.mappings()?;
            end = own_stack_end(&self.mappings, sp, fs_base);
        }
        let Some(end) = end else { return self.elsewhere(process, registers) };
        let len = self.read(process, 0, sp, end)?;
        Ok(Look { registers, fs_base, stack: &self.stack[..len], base: sp, foreign: false, one_piece: true })
    }

    /// A thread on another stack than its own: a signal handler's when a signal frame lies there, then all of its own
    /// stack counts as well, for the frame tells where it was interrupted and we do not look. Anything else is a
    /// coroutine: others may be suspended, with frames that nobody can find.
    fn elsewhere(&mut self, process: &Process, registers: Registers) -> Result<Look<'_>, Error> {
        let (fs_base, base) = (Avma(registers.fs_base), Avma(registers.rsp & !7));
        let end = mapping_at(&self.mappings, base).map_or(base, |m| Avma(m.end.0.min(base.0 + ALTERNATE_MAX)));
        let mut len = self.read(process, 0, base, end)?;
        let words = self.stack[..len].as_chunks::<8>().0;
        // found when the process was first looked at
        let returns = process.signal_returns()?;
        let signal = words.iter().any(|w| returns.contains(&u64::from_le_bytes(*w)));
        let mut foreign = true;
        if let Some((start, end)) = self.whole_own_stack(fs_base).filter(|_| signal) {
            len += self.read(process, len, start, end)?;
            foreign = false;
        }
        Ok(Look { registers, fs_base, stack: &self.stack[..len], base, foreign, one_piece: false })
    }

    /// All of the stack that belongs to a control block, used or not. The main thread's lies in a small mapping or the
    /// heap, where no stack ends.
    fn whole_own_stack(&self, fs_base: Avma) -> Option<(Avma, Avma)> {
        let mapping = mapping_at(&self.mappings, fs_base)?;
        if mapping.len() >= 16 << 10 && mapping.path.is_none() && fs_base.0 - mapping.start.0 >= 16 << 10 {
            return Some((Avma(mapping.start.0.max(fs_base.0.saturating_sub(STACK_MAX))), fs_base));
        }
        let stack = self.mappings.iter().find(|m| is_main_stack(m))?;
        Some((stack.start, stack.end))
    }

    /// Reads `[start, end)` behind the first `at` bytes of the buffer.
    fn read(&mut self, process: &Process, at: usize, start: Avma, end: Avma) -> Result<usize, Error> {
        let len = end.0.saturating_sub(start.0).min(STACK_MAX) as usize & !7;
        if self.stack.len() < at + len {
            self.stack.resize(at + len, 0);
        }
        process.memory().read(start, &mut self.stack[at..at + len])?;
        Ok(len)
    }
}

impl Look<'_> {
    /// Judges what was read.
    pub(crate) fn verdict(&self, forbidden: &Forbidden) -> Verdict {
        if self.registers.no_user_side() {
            return Verdict::KernelWorker;
        }
        if let Some(finding) = forbidden.find(&self.registers.values(), self.stack) {
            return Verdict::Busy(finding);
        }
        if self.foreign { Verdict::ForeignStack } else { Verdict::Clear }
    }

    /// Whether the thread stands inside the first bytes of an entry, or a signal frame of it points there.
    pub(crate) fn stands_inside(&self, boundaries: &[u64]) -> bool {
        let words = self.stack.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w));
        !boundaries.is_empty()
            && (boundaries.contains(&self.registers.rip) || words.into_iter().any(|w| boundaries.contains(&w)))
    }
}
