//! `crates/patch/runtime/include/stillpoint_abi.h` in Rust: layouts, and decoding and encoding of their bytes. Pure data.
//!
//! The structures are never mapped onto the target's memory; they only define the offset of each member. A test compiles the header and
//! compares every size, offset and constant.

use std::mem::offset_of;

/// First bytes of a control block.
pub const MAGIC: &[u8; 16] = b"STILLPOINT-CTRL\0";
/// Version of the layout.
pub const VERSION: u32 = 2;
/// Largest number of slots of a library.
pub const THREADS_MAX: u32 = 65536;
/// Upper limit of priorities, exclusive.
pub const PRIORITIES_MAX: u32 = 8;
/// Length of a thread's word in bytes.
const WORD_LEN: usize = size_of::<u32>();
/// Length of a name in bytes, with its terminating zero.
pub const NAME_MAX: usize = 16;

/// Way in which threads take a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    /// Each thread takes it at its next point.
    Local = 1,
    /// The threads of one group block until all of them are blocked; all others as `Local`.
    Group = 2,
    /// All threads block until all are blocked.
    Global = 3,
    /// Like `Local`, except for the threads of one group, which continue without it.
    Others = 4,
}

/// State of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum GatherOutcome {
    /// Threads are on their way, or are blocked.
    Gathering = 0,
    /// Blocked threads take the transition and continue.
    Released = 1,
    /// No thread takes it any more.
    Abandoned = 2,
}

/// Activity of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u32)]
pub enum ThreadState {
    /// The slot is unused.
    Free = 0,
    /// It runs the program.
    Active = 1,
    /// It waits, and holds no state of old code.
    Parked = 2,
    /// It has promised not to run code that could be patched.
    Inactive = 3,
    /// It is blocked at a request.
    Blocked = 4,
}

/// `struct sp_request`.
#[repr(C)]
pub struct RequestLayout {
    number: u32,
    transition: u32,
    mode: u32,
    patcher_pid: i32,
    deadline_ns: u64,
    word_offset: i64,
    group: [u8; NAME_MAX],
    generation: u32,
    reserved: u32,
    check: u64,
}

/// `struct sp_answer`.
#[repr(C)]
pub struct AnswerLayout {
    number: u32,
    outcome: u32,
    awaited: u32,
    awaited_priority: u32,
}

/// `struct sp_slot`.
#[repr(C)]
pub struct SlotLayout {
    state: u32,
    tid: i32,
    priority: u32,
    transition: u32,
    thread_pointer: u64,
    name: [u8; NAME_MAX],
    group: [u8; NAME_MAX],
    generation: u32,
    reserved: u32,
}

/// `struct sp_control`.
#[repr(C)]
pub struct ControlLayout {
    magic: [u8; 16],
    size: u32,
    version: u32,
    word_offset: i64,
    bell: u64,
    slots: u64,
    slot_size: u32,
    slots_used: u32,
    wake_fd: i32,
    priorities: u32,
    busy: u32,
    program_threads: u32,
    request: RequestLayout,
    answer: AnswerLayout,
}

/// Offset of the version in a control block, the same in every version.
pub const VERSION_AT: u64 = offset_of!(ControlLayout, version) as u64;
/// Length of a control block in bytes.
pub const CONTROL_LEN: usize = size_of::<ControlLayout>();
/// Length of a slot in bytes.
pub const SLOT_LEN: usize = size_of::<SlotLayout>();
/// Length of a request in bytes.
pub const REQUEST_LEN: usize = size_of::<RequestLayout>();
/// Offset of the request in a control block.
pub const REQUEST_AT: u64 = offset_of!(ControlLayout, request) as u64;
/// Offset of the answer in a control block.
pub const ANSWER_AT: u64 = offset_of!(ControlLayout, answer) as u64;
/// Offset of the outcome in a control block.
pub const OUTCOME_AT: u64 = ANSWER_AT + offset_of!(AnswerLayout, outcome) as u64;

/// A name or a group of up to 15 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Name([u8; NAME_MAX]);

impl Name {
    /// Returns `None` if the text is empty, too long or contains a zero.
    pub fn new(text: &str) -> Option<Name> {
        let bytes = text.as_bytes();
        let mut name = [0; NAME_MAX];
        let fits = !bytes.is_empty() && bytes.len() < NAME_MAX && !bytes.contains(&0);
        fits.then(|| name[..bytes.len()].copy_from_slice(bytes)).map(|()| Name(name))
    }

    fn decode(bytes: &[u8]) -> Name {
        let mut name = [0; NAME_MAX];
        let len = bytes.iter().position(|b| *b == 0).unwrap_or(0).min(NAME_MAX - 1);
        name[..len].copy_from_slice(&bytes[..len]);
        Name(name)
    }

    /// Returns true if the name is empty.
    pub fn is_empty(&self) -> bool {
        self.0[0] == 0
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let len = self.0.iter().position(|b| *b == 0).unwrap_or(NAME_MAX);
        // the program chose the name: it must not move a terminal's cursor
        String::from_utf8_lossy(&self.0[..len]).chars().try_for_each(|c| {
            let c = if c.is_control() { '?' } else { c };
            std::fmt::Write::write_char(f, c)
        })
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// A control block, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Control {
    /// Offset in bytes of the library's own word from the thread pointer.
    pub word_offset: i32,
    /// Address of the bell, the word that threads poll.
    pub bell: u64,
    /// Address of the slots.
    pub slots: u64,
    /// Number of slots that may be in use.
    pub slots_used: u32,
    /// Eventfd that makes the library check for a request; negative if there is none.
    pub wake_fd: i32,
    /// Number of priorities; 0 if the program never called `sp_init`.
    pub priorities: u32,
    /// True if a thread holds the library's lock.
    pub busy: bool,
    /// Number of threads that the program reports; 0 if it reported none.
    pub program_threads: u32,
    /// Last request written; `None` if it is incomplete.
    pub request: Option<Request>,
    /// Number of the request to which the outcome belongs.
    pub answered: u32,
    /// State of that request.
    pub outcome: GatherOutcome,
    /// The highest number in use; the next request takes a higher one.
    pub last_number: u32,
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Number of the request: never 0, never used before.
    pub number: u32,
    /// New value of the thread's word.
    pub word: u32,
    /// Way in which threads take it.
    pub mode: Mode,
    /// Number of the process that makes the request.
    pub patcher_pid: i32,
    /// Deadline in nanoseconds of `CLOCK_MONOTONIC`.
    pub deadline_ns: u64,
    /// Offset in bytes of the word from the thread pointer.
    pub word_offset: i64,
    /// Group for [`Mode::Group`] and [`Mode::Others`].
    pub group: Name,
    /// Address-space generation to which the thread migrates instead of changing its word, 0 for none.
    pub generation: u32,
}

/// A thread registered with the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Activity of the thread.
    pub state: ThreadState,
    /// Its number in the PID namespace of the process.
    pub tid: i32,
    /// Priority of its role.
    pub priority: u32,
    /// The word that it last took, 0 for none.
    pub word: u32,
    /// Value of its thread pointer.
    pub thread_pointer: u64,
    /// Name that the program gave it.
    pub name: Name,
    /// Its group; empty for none.
    pub group: Name,
    /// The generation to which it last migrated, 0 for none.
    pub generation: u32,
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u32_at(from: &[u8], at: usize) -> Option<u32> {
    bytes(from, at).map(u32::from_le_bytes)
}

fn u64_at(from: &[u8], at: usize) -> Option<u64> {
    bytes(from, at).map(u64::from_le_bytes)
}

fn checksum(request: &[u8]) -> u64 {
    let covered = request.iter().take(offset_of!(RequestLayout, check));
    covered.fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

impl Control {
    /// Decodes a control block; `None` if its form is unknown to this program, or if it contradicts itself.
    pub fn decode(from: &[u8]) -> Option<Control> {
        if from.get(..16)? != MAGIC {
            return None;
        }
        let word = |at| u32_at(from, at);
        let known = word(offset_of!(ControlLayout, size))? as usize == CONTROL_LEN
            && word(offset_of!(ControlLayout, version))? == VERSION
            && word(offset_of!(ControlLayout, slot_size))? as usize == SLOT_LEN;
        let slots_used = word(offset_of!(ControlLayout, slots_used))?;
        let priorities = word(offset_of!(ControlLayout, priorities))?;
        let word_offset = u64_at(from, offset_of!(ControlLayout, word_offset))? as i64;
        if !known || slots_used > THREADS_MAX || priorities > PRIORITIES_MAX || word_offset % WORD_LEN as i64 != 0 {
            return None;
        }
        let raw = from.get(REQUEST_AT as usize..REQUEST_AT as usize + REQUEST_LEN)?;
        let answer = ANSWER_AT as usize;
        let answered = word(answer + offset_of!(AnswerLayout, number))?;
        Some(Control {
            word_offset: i32::try_from(word_offset).ok()?,
            bell: u64_at(from, offset_of!(ControlLayout, bell))?,
            slots: u64_at(from, offset_of!(ControlLayout, slots))?,
            slots_used,
            wake_fd: word(offset_of!(ControlLayout, wake_fd))? as i32,
            priorities,
            busy: word(offset_of!(ControlLayout, busy))? != 0,
            program_threads: word(offset_of!(ControlLayout, program_threads))?,
            request: Request::decode(raw),
            answered,
            outcome: match word(answer + offset_of!(AnswerLayout, outcome))? {
                0 => GatherOutcome::Gathering,
                1 => GatherOutcome::Released,
                2 => GatherOutcome::Abandoned,
                _ => return None,
            },
            last_number: answered.max(u32_at(raw, offset_of!(RequestLayout, number))?),
        })
    }

    /// Returns the request on which threads may still act.
    pub fn pending(&self) -> Option<&Request> {
        let request = self.request.as_ref()?;
        (request.number == self.answered && self.outcome == GatherOutcome::Gathering).then_some(request)
    }
}

impl Request {
    fn decode(from: &[u8]) -> Option<Request> {
        let number = u32_at(from, offset_of!(RequestLayout, number))?;
        if number == 0 || u64_at(from, offset_of!(RequestLayout, check))? != checksum(from) {
            return None;
        }
        Some(Request {
            number,
            word: u32_at(from, offset_of!(RequestLayout, transition))?,
            mode: match u32_at(from, offset_of!(RequestLayout, mode))? {
                1 => Mode::Local,
                2 => Mode::Group,
                3 => Mode::Global,
                4 => Mode::Others,
                _ => return None,
            },
            patcher_pid: u32_at(from, offset_of!(RequestLayout, patcher_pid))? as i32,
            deadline_ns: u64_at(from, offset_of!(RequestLayout, deadline_ns))?,
            word_offset: u64_at(from, offset_of!(RequestLayout, word_offset))? as i64,
            group: Name::decode(&bytes::<NAME_MAX>(from, offset_of!(RequestLayout, group))?),
            generation: u32_at(from, offset_of!(RequestLayout, generation))?,
        })
    }

    /// Returns the bytes of `struct sp_request`, with their checksum.
    pub fn encode(&self) -> [u8; REQUEST_LEN] {
        let mut out = [0; REQUEST_LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(offset_of!(RequestLayout, number), &self.number.to_le_bytes());
        put(offset_of!(RequestLayout, transition), &self.word.to_le_bytes());
        put(offset_of!(RequestLayout, mode), &(self.mode as u32).to_le_bytes());
        put(offset_of!(RequestLayout, patcher_pid), &self.patcher_pid.to_le_bytes());
        put(offset_of!(RequestLayout, deadline_ns), &self.deadline_ns.to_le_bytes());
        put(offset_of!(RequestLayout, word_offset), &self.word_offset.to_le_bytes());
        put(offset_of!(RequestLayout, group), &self.group.0);
        put(offset_of!(RequestLayout, generation), &self.generation.to_le_bytes());
        let check = checksum(&out);
        out[offset_of!(RequestLayout, check)..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Returns true if a thread has to block at this request, together with others.
    pub fn together(&self, slot: &Slot) -> bool {
        match self.mode {
            Mode::Global => true,
            Mode::Group => slot.group == self.group,
            Mode::Local | Mode::Others => false,
        }
    }

    /// Returns true if the request still waits for a thread: a parked or inactive thread comes back through the library.
    pub fn awaits(&self, slot: &Slot) -> bool {
        if slot.state != ThreadState::Active {
            return false;
        }
        let passes_by = self.mode == Mode::Others && slot.group == self.group;
        self.together(slot) || !passes_by && !self.is_taken_by(slot)
    }

    /// Returns true if a thread has taken the word or generation of this request.
    pub fn is_taken_by(&self, slot: &Slot) -> bool {
        if self.generation == 0 { slot.word == self.word } else { slot.generation == self.generation }
    }
}

/// Returns the bytes of `struct sp_answer` for a request that is about to be made.
pub fn encode_answer(number: u32) -> [u8; size_of::<AnswerLayout>()] {
    let mut out = [0; size_of::<AnswerLayout>()];
    out[..4].copy_from_slice(&number.to_le_bytes());
    out
}

/// Decodes the used slots among many; invalid slots are omitted.
pub fn decode_slots(from: &[u8]) -> Vec<Slot> {
    from.chunks_exact(SLOT_LEN).filter_map(decode_slot).collect()
}

fn decode_slot(from: &[u8]) -> Option<Slot> {
    let state = match u32_at(from, offset_of!(SlotLayout, state))? {
        1 => ThreadState::Active,
        2 => ThreadState::Parked,
        3 => ThreadState::Inactive,
        4 => ThreadState::Blocked,
        _ => return None,
    };
    Some(Slot {
        state,
        tid: u32_at(from, offset_of!(SlotLayout, tid))? as i32,
        priority: u32_at(from, offset_of!(SlotLayout, priority))?,
        word: u32_at(from, offset_of!(SlotLayout, transition))?,
        thread_pointer: u64_at(from, offset_of!(SlotLayout, thread_pointer))?,
        name: Name::decode(&bytes::<NAME_MAX>(from, offset_of!(SlotLayout, name))?),
        group: Name::decode(&bytes::<NAME_MAX>(from, offset_of!(SlotLayout, group))?),
        generation: u32_at(from, offset_of!(SlotLayout, generation))?,
    })
}

/// Returns every size and offset, by its name in C.
pub fn facts() -> Vec<(&'static str, u64)> {
    macro_rules! offsets {
        ($($c:literal $layout:ident: $($member:ident)*;)*) => {
            vec![$(
                (concat!("sizeof(struct ", $c, ")"), size_of::<$layout>() as u64),
                $((concat!("offsetof(struct ", $c, ", ", stringify!($member), ")"), offset_of!($layout, $member) as u64),)*
            )*]
        };
    }
    offsets! {
        "sp_request" RequestLayout: number transition mode patcher_pid deadline_ns word_offset group
            generation reserved check;
        "sp_answer" AnswerLayout: number outcome awaited awaited_priority;
        "sp_slot" SlotLayout: state tid priority transition thread_pointer name group generation reserved;
        "sp_control" ControlLayout: magic size version word_offset bell slots slot_size slots_used wake_fd priorities
            busy program_threads request answer;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request {
            number: 7,
            word: 0x5350_0003,
            mode: Mode::Group,
            patcher_pid: 4711,
            deadline_ns: 1 << 40,
            word_offset: -8,
            group: Name::new("workers").expect("fits"),
            generation: 0,
        }
    }

    #[test]
    fn a_request_is_read_back_and_a_torn_one_is_not() {
        let encoded = request().encode();
        assert_eq!(Request::decode(&encoded), Some(request()));
        for at in 0..encoded.len() {
            let mut torn = encoded;
            torn[at] ^= 1;
            assert_eq!(Request::decode(&torn), None, "byte {at}");
        }
    }

    #[test]
    fn names_have_limits() {
        assert!(Name::new("").is_none() && Name::new("a name of sixteen").is_none() && Name::new("a\0b").is_none());
        let name = Name::new("fifteen letters").expect("fits");
        assert_eq!(name.to_string(), "fifteen letters");
        assert_eq!(Name::decode(b"\x1b[2J\0\0\0\0\0\0\0\0\0\0\0\0").to_string(), "?[2J");
    }

    #[test]
    fn who_is_awaited() {
        let slot = |state, word, group: &str| Slot {
            state,
            tid: 1,
            priority: 0,
            word,
            thread_pointer: 0,
            name: Name::default(),
            group: Name::new(group).unwrap_or_default(),
            generation: 0,
        };
        let (member, other) = (slot(ThreadState::Active, 0, "workers"), slot(ThreadState::Active, 0, ""));
        let over = slot(ThreadState::Active, 0x5350_0003, "");
        let parked = slot(ThreadState::Parked, 0, "workers");
        let of = |mode| Request { mode, ..request() };
        assert!(of(Mode::Local).awaits(&member) && of(Mode::Local).awaits(&other) && !of(Mode::Local).awaits(&over));
        assert!(!of(Mode::Others).awaits(&member) && of(Mode::Others).awaits(&other));
        assert!(of(Mode::Group).awaits(&member) && of(Mode::Group).awaits(&other) && !of(Mode::Group).awaits(&over));
        assert!(of(Mode::Global).awaits(&over) && !of(Mode::Global).awaits(&parked));
        // if a generation decides, words do not
        let by_generation = Request { generation: 3, ..of(Mode::Local) };
        assert!(by_generation.awaits(&over) && !by_generation.awaits(&Slot { generation: 3, ..over }));
    }

    #[test]
    fn what_is_not_a_control_block_is_none() {
        for len in 0..CONTROL_LEN + 8 {
            assert_eq!(Control::decode(&vec![0xff; len]), None);
            let mut bytes = vec![0; len];
            bytes.iter_mut().zip(MAGIC).for_each(|(b, m)| *b = *m);
            assert_eq!(Control::decode(&bytes), None);
        }
    }
}
