//! The stack walk, frame by frame.

use crate::search_table::SearchTable;
use crate::section::{Bytes, Section};
use gimli::{
    BaseAddresses, CfaRule, EhFrame, EndianSlice, EvaluationResult, FrameDescriptionEntry, LittleEndian, Location,
    Register, RegisterRule, UnwindContext, UnwindExpression, UnwindSection, UnwindTableRow, Value, X86_64,
};

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Largest number of frames; a walk that reaches it ends, because the stack may be circular.
const FRAMES_MAX: usize = 4096;
/// Largest record, in bytes. A record is executed once for each frame that it describes; records of compilers have some hundred bytes.
const RECORD_MAX: usize = 256 << 10;
/// Largest number of operations of one expression, which may jump back; expressions of compilers have some ten.
const OPERATIONS_MAX: u32 = 10_000;
const REGISTERS: usize = 17;
const RSP: usize = 7;
const RETURN_ADDRESS: usize = 16;

/// Code with its unwind data.
pub struct Module<'r> {
    /// Its `.eh_frame`, to the terminator or beyond.
    pub eh_frame: Section<'r>,
    /// Its `.eh_frame_hdr`, the search table that linkers make of it (LSB). Without one, every record is read to make such a table.
    pub eh_frame_hdr: Option<Section<'r>>,
}

/// Registers of a stopped thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Registers {
    /// Program counter.
    pub pc: u64,
    /// General registers by their DWARF numbers: rax rdx rcx rbx rsi rdi rbp rsp r8 .. r15.
    pub general: [u64; 16],
}

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// The program counter, or a return address.
    pub address: u64,
    /// True if the thread is stopped at this address, or a signal interrupted it there; false if it will return there.
    pub executing: bool,
    /// Address in the stack pointer in that frame.
    pub sp: u64,
}

/// The reason why a walk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The last frame states that it has no caller.
    Outermost,
    /// No unwind data covers this address.
    NoData(u64),
    /// Unwind data at this address is not understood.
    NotUnderstood(u64),
    /// This word of the stack cannot be read.
    Unreadable(u64),
    /// The stack has no end: too many frames, or a frame that is not above the one before.
    TooDeep,
}

/// Frames, and the reason why there are no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    /// Frames, innermost first.
    pub frames: Vec<Frame>,
    /// The reason why there are no more frames.
    pub end: End,
}

impl Walk {
    /// Returns true if the walk reached the outermost frame.
    pub fn is_complete(&self) -> bool {
        self.end == End::Outermost
    }
}

struct Indexed<'r> {
    eh_frame: Section<'r>,
    bases: BaseAddresses,
    index: Index<'r>,
}

/// Index of the descriptions of functions.
enum Index<'r> {
    /// In the module's own search table.
    Table(SearchTable<'r>),
    /// First address, end, offset of the description, ascending.
    Functions(Vec<(u64, u64, usize)>),
}

/// Unwind data of a whole process.
#[derive(Default)]
pub struct Unwinder<'r> {
    modules: Vec<Indexed<'r>>,
}

impl<'r> Unwinder<'r> {
    /// Indexes the unwind data; data that cannot be parsed describes no code.
    pub fn new(modules: Vec<Module<'r>>) -> Self {
        Unwinder { modules: modules.into_iter().map(Indexed::new).collect() }
    }

    /// Walks a stack; `read` returns the word at an address of the stack, or `None`.
    pub fn walk(&self, registers: Registers, mut read: impl FnMut(u64) -> Option<u64>) -> Walk {
        let mut current = [0; REGISTERS];
        current[..16].copy_from_slice(&registers.general);
        current[RETURN_ADDRESS] = registers.pc;
        let mut frames = Vec::new();
        let mut executing = true;
        let end = loop {
            let address = current[RETURN_ADDRESS];
            frames.push(Frame { address, executing, sp: current[RSP] });
            if frames.len() >= FRAMES_MAX {
                break End::TooDeep;
            }
            match self.step(&current, executing, &mut read) {
                Ok(Some((caller, signal))) => {
                    if caller[RSP] <= current[RSP] && !signal {
                        break End::TooDeep;
                    }
                    (current, executing) = (caller, signal);
                }
                Ok(None) => break End::Outermost,
                Err(end) => break end,
            }
        };
        Walk { frames, end }
    }

    /// Returns the caller's registers and true if this frame is the trampoline of a signal; `None` if there is no caller.
    fn step(
        &self,
        current: &[u64; REGISTERS],
        executing: bool,
        read: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Result<Option<([u64; REGISTERS], bool)>, End> {
        let address = current[RETURN_ADDRESS];
        // a return address belongs to the call before it, and that call may be the last instruction of its function
        let lookup = if executing { address } else { address.wrapping_sub(1) };
        let modules = self.modules.iter().filter_map(|m| m.function(lookup).map(|offset| (m, offset)));
        let (module, offset) = modules.into_iter().next().ok_or(End::NoData(address))?;
        module.unwind(offset, lookup, current, read).map_err(|end| end.unwrap_or(End::NotUnderstood(address)))
    }
}

impl<'r> Indexed<'r> {
    fn new(module: Module<'r>) -> Self {
        let bases = BaseAddresses::default().set_eh_frame(module.eh_frame.at());
        let table = module.eh_frame_hdr.and_then(|hdr| SearchTable::of(hdr, module.eh_frame.at()));
        let index = match table {
            Some(table) => Index::Table(table),
            None => Index::Functions(functions(&module.eh_frame.whole(), &bases)),
        };
        Indexed { eh_frame: module.eh_frame, bases, index }
    }

    /// Returns the offset of the description of the function that holds this address.
    fn function(&self, address: u64) -> Option<usize> {
        match &self.index {
            Index::Functions(functions) => {
                let index = functions.partition_point(|f| f.0 <= address).checked_sub(1)?;
                let (_, end, offset) = functions[index];
                (address < end).then_some(offset)
            }
            Index::Table(table) => {
                let offset = table.last_to_begin_at_most(address)?.checked_sub(self.eh_frame.at())?;
                let bytes = self.record(offset as usize)?;
                let section = EhFrame::new(&bytes, LittleEndian);
                let fde = section.fde_from_offset(&self.bases, (offset as usize).into(), EhFrame::cie_from_offset);
                fde.ok()?.contains(address).then_some(offset as usize)
            }
        }
    }

    /// Returns the section with this description, and the record that it shares with others, read.
    fn record(&self, offset: usize) -> Option<Bytes<'_>> {
        let common = self.eh_frame.word(offset.checked_add(4)?)? as usize;
        self.entry((offset + 4).checked_sub(common)?)?;
        self.entry(offset)
    }

    /// Returns one entry with its length field; an entry of more than [`RECORD_MAX`] bytes is not understood.
    fn entry(&self, offset: usize) -> Option<Bytes<'_>> {
        let len = self.eh_frame.word(offset).map(|len| len as usize).filter(|len| *len <= RECORD_MAX)?;
        self.eh_frame.with(offset, 4 + len)
    }

    fn unwind(
        &self,
        offset: usize,
        lookup: u64,
        current: &[u64; REGISTERS],
        read: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Result<Option<([u64; REGISTERS], bool)>, Option<End>> {
        let bytes = self.record(offset).ok_or(None)?;
        let section = EhFrame::new(&bytes, LittleEndian);
        let fde = section.fde_from_offset(&self.bases, offset.into(), EhFrame::cie_from_offset).map_err(|_| None)?;
        let mut context = UnwindContext::new();
        let row = fde.unwind_info_for_address(&section, &self.bases, &mut context, lookup).map_err(|_| None)?;
        let frame = FrameOf { section: &section, fde: &fde, current };
        let cfa = frame.cfa(row, read)?;
        let mut caller = *current;
        for (number, value) in caller.iter_mut().enumerate() {
            match row.register(Register(number as u16)) {
                Some(RegisterRule::Undefined) if number == RETURN_ADDRESS => return Ok(None),
                None if number == RETURN_ADDRESS => return Err(None),
                None | Some(RegisterRule::Undefined | RegisterRule::SameValue) => {}
                Some(rule) => *value = frame.register(&rule, cfa, read)?,
            }
        }
        if caller[RETURN_ADDRESS] == current[RETURN_ADDRESS] && caller[RSP] == current[RSP] {
            return Err(None);
        }
        if matches!(row.register(X86_64::RSP), None | Some(RegisterRule::Undefined | RegisterRule::SameValue)) {
            caller[RSP] = cfa;
        }
        Ok(Some((caller, fde.is_signal_trampoline())))
    }
}

/// Reads every record; returns (start, end, offset of the record), ascending.
fn functions(eh_frame: &[u8], bases: &BaseAddresses) -> Vec<(u64, u64, usize)> {
    let mut functions = Vec::new();
    let section = EhFrame::new(eh_frame, LittleEndian);
    let mut entries = section.entries(bases);
    while let Ok(Some(entry)) = entries.next() {
        let gimli::CieOrFde::Fde(partial) = entry else { continue };
        let Ok(fde) = partial.parse(EhFrame::cie_from_offset) else { continue };
        let start = fde.initial_address();
        if let Some(end) = start.checked_add(fde.len()).filter(|end| *end > start) {
            functions.push((start, end, fde.offset()));
        }
    }
    functions.sort_unstable();
    functions
}

struct FrameOf<'f, 'a> {
    section: &'f EhFrame<Slice<'a>>,
    fde: &'f FrameDescriptionEntry<Slice<'a>>,
    current: &'f [u64; REGISTERS],
}

type Outcome<T> = Result<T, Option<End>>;

impl FrameOf<'_, '_> {
    fn value(&self, register: Register) -> Outcome<u64> {
        self.current.get(usize::from(register.0)).copied().ok_or(None)
    }

    fn cfa(&self, row: &UnwindTableRow<usize>, read: &mut impl FnMut(u64) -> Option<u64>) -> Outcome<u64> {
        match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => Ok(self.value(*register)?.wrapping_add_signed(*offset)),
            CfaRule::Expression(expression) => self.evaluate(expression, None, read),
        }
    }

    fn register(
        &self,
        rule: &RegisterRule<usize>,
        cfa: u64,
        read: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Outcome<u64> {
        let mut word = |at: u64| read(at).ok_or(Some(End::Unreadable(at)));
        match rule {
            RegisterRule::Offset(offset) => word(cfa.wrapping_add_signed(*offset)),
            RegisterRule::ValOffset(offset) => Ok(cfa.wrapping_add_signed(*offset)),
            RegisterRule::Register(other) => self.value(*other),
            RegisterRule::Expression(expression) => {
                let at = self.evaluate(expression, Some(cfa), read)?;
                read(at).ok_or(Some(End::Unreadable(at)))
            }
            RegisterRule::ValExpression(expression) => self.evaluate(expression, Some(cfa), read),
            _ => Err(None),
        }
    }

    fn evaluate(
        &self,
        expression: &UnwindExpression<usize>,
        initial: Option<u64>,
        read: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Outcome<u64> {
        let expression = expression.get(self.section).map_err(|_| None)?;
        let mut evaluation = expression.evaluation(self.fde.cie().encoding());
        evaluation.set_max_iterations(OPERATIONS_MAX);
        if let Some(initial) = initial {
            evaluation.set_initial_value(initial);
        }
        let mut result = evaluation.evaluate().map_err(|_| None)?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    evaluation.resume_with_register(Value::Generic(self.value(register)?)).map_err(|_| None)?
                }
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    let word = read(address).ok_or(Some(End::Unreadable(address)))?;
                    evaluation.resume_with_memory(Value::Generic(word)).map_err(|_| None)?
                }
                _ => return Err(None),
            };
        }
        match evaluation.result().first().map(|piece| &piece.location) {
            Some(Location::Address { address }) => Ok(*address),
            _ => Err(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::{Object, ObjectSection};

    fn held(at: u64, bytes: &[u8]) -> Section<'_> {
        let read = move |from: u64, buf: &mut [u8]| {
            buf.copy_from_slice(&bytes[(from - at) as usize..][..buf.len()]);
            buf.len()
        };
        Section::new(at, bytes.len(), read)
    }

    #[test]
    fn the_linkers_table_leads_where_reading_every_record_does() {
        let program = std::fs::read("/proc/self/exe").expect("this program's file");
        let file = object::File::parse(&*program).expect("an ELF file");
        let section = |name: &str| {
            let section = file.section_by_name(name).unwrap_or_else(|| panic!("no {name}"));
            (section.address(), section.data().expect("its bytes").to_vec())
        };
        let (eh_frame_at, eh_frame) = section(".eh_frame");
        let (hdr_at, hdr) = section(".eh_frame_hdr");
        let eh_frame = || held(eh_frame_at, &eh_frame);
        let by_table = Indexed::new(Module { eh_frame: eh_frame(), eh_frame_hdr: Some(held(hdr_at, &hdr)) });
        let by_reading = Indexed::new(Module { eh_frame: eh_frame(), eh_frame_hdr: None });
        let Index::Functions(functions) = &by_reading.index else { panic!("no table was given") };
        assert!(matches!(by_table.index, Index::Table(_)), "the linker made a table");
        assert!(functions.len() > 100, "{} functions", functions.len());
        for (start, end, offset) in functions {
            for address in [*start, *end - 1] {
                assert_eq!(by_table.function(address), Some(*offset), "at {address:#x}");
            }
            assert_eq!(by_table.function(*end), by_reading.function(*end), "behind {start:#x}");
        }
        let first = functions[0].0;
        assert_eq!((by_table.function(first - 1), by_table.function(0)), (None, None));
    }

    #[test]
    fn a_table_of_other_data_is_not_used() {
        let eh_frame = crate::describe(0x1000, &[crate::Piece::plain(0x2000, 64)]).expect("within reach");
        let hdr = crate::search_table(0x1000, &eh_frame, 0x4000).expect("within reach");
        for (at, used) in [(0x4000, true), (0x4008, false)] {
            let eh_frame_hdr = Some(held(at, &hdr));
            let indexed = Indexed::new(Module { eh_frame: held(0x1000, &eh_frame), eh_frame_hdr });
            assert_eq!(matches!(indexed.index, Index::Table(_)), used);
            assert_eq!(indexed.function(0x2000), indexed.function(0x203f));
            assert!(indexed.function(0x2000).is_some() && indexed.function(0x2040).is_none());
        }
    }
}
