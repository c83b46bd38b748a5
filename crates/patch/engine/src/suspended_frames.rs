//! Frames on stacks on which no thread executes: coroutines that a program switches by itself (fibers).
//!
//! A thread's own stack shows to which code it will return. A suspended coroutine has its frames elsewhere: in the heap, in memory of its
//! own, in a static array. Neither the kernel nor the C library knows such stacks. So in programs that switch stacks, and only in these,
//! all memory that may be such a stack is searched for return addresses into code to be left, without stopping a thread. A word that is
//! there by chance, or remains from a call that has ended, counts: an error is possible only towards "not yet", as in the search of
//! threads' stacks. The search is limited in bytes and time; the part not searched is reported. A program that imports the coroutines of
//! the C library certainly has suspended frames: it is refused if it has more memory than is searched.
//!
//! A program switches stacks if it imports a function that does, if a library that offers one is mapped, or if its text loads the stack
//! pointer in a way that only such functions use.

use crate::Error;
use crate::error::Busy;
use crate::image::{Dynamic, text_segments};
use crate::ledger::{Span, Transition};
use crate::options::Options;
use crate::report::Report;
use crate::scan::Forbidden;
use crate::target::Target;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_base::{PAGE, page_start};
use stillpoint_events::patch;
use stillpoint_patch_format::{Avma, BuildId, Svma};
use stillpoint_patch_tracee::{Mapping, Memory, Module, Pagemap, Process};

/// Functions of the C library that switch stacks, and of libraries for coroutines. A library that defines one of the latter is mapped only
/// for that purpose.
const LIBC_SWITCH_FUNCTIONS: [&str; 2] = ["swapcontext", "makecontext"];
const COROUTINE_FUNCTIONS: [&str; 6] =
    ["jump_fcontext", "ontop_fcontext", "ASYNC_start_job", "co_switch", "aco_resume", "coro_transfer"];

/// Bytes of text read at once.
const TEXT_CHUNK_LEN: u64 = 4 << 20;
/// Largest distance in bytes between the instructions that store and load the stack pointer in a function that switches.
const SWITCH_LEN: usize = 96;
/// Limits of one search in bytes and time.
const SEARCH_BYTES_MAX: u64 = 1 << 30;
const SEARCH_TIME_MAX: Duration = Duration::from_secs(1);
/// Minimum pause between two searches, and ratio of the interval between searches to the duration of one: most of the time belongs to the
/// program.
const SEARCH_PAUSE_MIN: Duration = Duration::from_millis(20);
const SEARCH_INTERVAL_RATIO: u32 = 5;
/// Bytes of memory read at once.
const MEMORY_CHUNK_LEN: u64 = 1 << 20;
/// Part of a stack's mapping, at its end, that is searched for a thread's control block, in bytes; static thread-local memory is between.
const CONTROL_BLOCK_WITHIN: u64 = 256 << 10;

/// A word that may be the return address of a suspended frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    function: Arc<str>,
    address: Avma,
    within: String,
}

impl Frame {
    /// Returns the text for people: `f, on a suspended stack (at 0x... in [heap])`.
    pub(crate) fn describe(&self) -> String {
        format!("{}, on a suspended stack (at {} in {})", self.function, self.address, self.within)
    }
}

/// Result of a search.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Search {
    pub(crate) found: Option<Frame>,
    /// Bytes that were searched.
    pub(crate) searched: u64,
    /// Bytes that the limits did not allow to search.
    pub(crate) left: u64,
}

/// Returns the reason why a process probably switches stacks by itself; `None` if there is none.
///
/// # Errors
/// The process has ended.
pub(crate) fn switches_stacks(process: &Process, modules: &[Module]) -> Result<Option<String>, Error> {
    let memory = process.memory();
    for module in modules {
        let Some(dynamic) = Dynamic::of(memory, module)? else { continue };
        if module.executable {
            let known = |name: &[u8]| {
                LIBC_SWITCH_FUNCTIONS.iter().chain(&COROUTINE_FUNCTIONS).any(|known| known.as_bytes() == name)
            };
            if let Some((_, name)) = dynamic.bound_slots(known).first() {
                return Ok(Some(format!("it imports {}", String::from_utf8_lossy(name))));
            }
            if let Some(at) = switch_of(process, module)? {
                return Ok(Some(format!("its text switches stacks at {at}")));
            }
        } else if let Some(name) = COROUTINE_FUNCTIONS.iter().find(|name| dynamic.find(name, None).is_some()) {
            // libcrypto offers coroutines too, and many processes map it
            if *name != "ASYNC_start_job" {
                return Ok(Some(format!("{} defines {name}", module.path)));
            }
        }
    }
    Ok(None)
}

/// Refuses a program that uses the coroutines of the C library if not all memory that may hold their stacks can be searched, unless its
/// operator allows it.
///
/// # Errors
/// [`Error::SuspendedFrames`] for such a program.
pub(crate) fn refuse_contexts(target: &Target, options: &Options) -> Result<(), Error> {
    let executable = target.modules.iter().find(|module| module.executable && !options.allow_suspended_frames);
    let Some(executable) = executable else { return Ok(()) };
    let Some(dynamic) = Dynamic::of(target.process.memory(), executable)? else { return Ok(()) };
    let slots = dynamic.bound_slots(|name| LIBC_SWITCH_FUNCTIONS.iter().any(|known| known.as_bytes() == name));
    let Some((_, name)) = slots.first() else { return Ok(()) };
    let (process, why) = (&target.process, format!("it imports {}", String::from_utf8_lossy(name)));
    let mappings = process.mappings()?;
    let mut pages = Pagemap::of(process.pid());
    let held = |mapping: &Mapping| {
        (mapping.start.0..mapping.end.0).step_by(PAGE as usize).filter(|at| pages.is_held(Avma(*at))).count()
    };
    let held: usize = mappings.iter().filter(|mapping| may_hold_stacks(mapping)).map(held).sum();
    let bytes = held as u64 * PAGE;
    if bytes > SEARCH_BYTES_MAX {
        let (mib, limit) = (bytes >> 20, SEARCH_BYTES_MAX >> 20);
        let frames = format!("{mib} MiB may hold suspended frames, and {limit} MiB are searched");
        return Err(Error::SuspendedFrames { pid: process.pid(), why, frames });
    }
    Ok(())
}

/// Refuses a transition that moves all threads at once while a frame of code to be left is on a suspended stack.
///
/// # Errors
/// [`Error::SuspendedFrames`] if such a frame is found.
pub(crate) fn refuse(target: &Target, transition: &Transition, options: &Options) -> Result<(), Error> {
    if options.allow_suspended_frames {
        return Ok(());
    }
    let Some(why) = switches_stacks(&target.process, &target.modules)? else { return Ok(()) };
    let forbidden = Forbidden::new(&transition.leave, &[], &[]);
    let found = search(&target.process, &forbidden, target.ledger_at())?.found;
    let pid = target.process.pid();
    found.map_or(Ok(()), |frame| Err(Error::SuspendedFrames { pid, why, frames: frame.describe() }))
}

/// Address at which a file's text switches stacks.
type Switch = Option<Svma>;

/// Results for files that were searched: all processes of a rollout run the same file, and its text may have 100 MiB.
#[derive(Default)]
struct SearchCache(Mutex<Vec<(FileKey, Switch)>>);

/// Device and inode of a file, its build-id, and offset and length of the text that was searched: a process that has unmapped a part of it
/// gets a result of its own.
type FileKey = (((u32, u32), u64), Option<BuildId>, Vec<(u64, u64)>);

impl SearchCache {
    /// Returns the result for a file; one thread searches while others wait for it. An error is not stored.
    fn get_or_search(&self, file: FileKey, search: impl FnOnce() -> io::Result<Switch>) -> io::Result<Switch> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, answer)) = known.iter().find(|(of, _)| *of == file) {
            return Ok(*answer);
        }
        let answer = search()?;
        known.push((file, answer));
        Ok(answer)
    }
}

/// Returns the address at which the text of an executable switches stacks. The text is read from the file, because one process may have
/// changed its memory. If the file cannot be read, the text is read from memory.
fn switch_of(process: &Process, module: &Module) -> Result<Option<Avma>, Error> {
    static SEARCHED: SearchCache = SearchCache(Mutex::new(Vec::new()));
    let text = module.mappings.iter().filter(|mapping| mapping.execute && mapping.inode != 0);
    let spans: Vec<(u64, Span)> = text.map(|m| (m.offset, Span::new(m.start, m.len()))).collect();
    let Some(first) = module.mappings.first() else { return Ok(None) };
    let of_file = || -> io::Result<Switch> {
        let file = process.open_mapping(first).map_err(io::Error::other)?;
        for (offset, span) in &spans {
            let read = |at: u64, buf: &mut [u8]| {
                let mut filled = 0;
                while filled < buf.len() {
                    match file.read_at(&mut buf[filled..], offset + at + filled as u64)? {
                        0 => break,
                        read => filled += read,
                    }
                }
                Ok::<_, io::Error>(filled)
            };
            if let Some(at) = switch_in_text(span.len, read)? {
                return Ok(Some(module.svma(Avma(span.start.0 + at))));
            }
        }
        Ok(None)
    };
    let searched = spans.iter().map(|(offset, span)| (*offset, span.len)).collect();
    match SEARCHED.get_or_search((module.file, module.build_id.clone(), searched), of_file) {
        Ok(found) => Ok(found.map(|at| module.avma(at))),
        Err(error) => {
            tracing::debug!(%error, "the text of {} is read from memory instead of its file", module.path);
            search_memory(process.memory(), module)
        }
    }
}

fn search_memory(memory: &Memory, module: &Module) -> Result<Option<Avma>, Error> {
    for span in text_segments(memory, module)? {
        let read = |at: u64, buf: &mut [u8]| Ok::<_, Error>(memory.read_some(Avma(span.start.0 + at), buf));
        if let Some(at) = switch_in_text(span.len, read)? {
            return Ok(Some(Avma(span.start.0 + at)));
        }
    }
    Ok(None)
}

/// Returns the offset of a switch in text of `len` bytes; `read` fills a buffer from an offset on, as far as it can be read.
fn switch_in_text<E>(len: u64, mut read: impl FnMut(u64, &mut [u8]) -> Result<usize, E>) -> Result<Option<u64>, E> {
    let mut at = 0;
    while at < len {
        let mut text = vec![0; (len - at).min(TEXT_CHUNK_LEN) as usize];
        let read = read(at, &mut text)?;
        if let Some(offset) = switch_in(&text[..read]) {
            return Ok(Some(at + offset as u64));
        }
        if read < text.len() {
            break;
        }
        // a function may cross the end
        let next = at + text.len() as u64;
        at = if next < len { next - SWITCH_LEN as u64 } else { next };
    }
    Ok(None)
}

/// Returns the offset of code that stores the stack pointer and loads another one nearby. Compilers load it from `%rbp` (frames) and from
/// callee-saved registers (arrays of variable length); functions that switch load it from memory or an argument.
fn switch_in(text: &[u8]) -> Option<usize> {
    let opcodes = memchr::memchr2_iter(0x89, 0x8b, text).filter_map(|opcode| opcode.checked_sub(1));
    opcodes.filter(|at| loads_stack_pointer(&text[*at..])).find(|at| {
        let near = &text[at.saturating_sub(SWITCH_LEN)..(at + SWITCH_LEN).min(text.len())];
        near.windows(3).any(stores_stack_pointer)
    })
}

/// Returns true for `mov (%reg),%rsp`, `mov disp(%reg),%rsp`, or `mov %reg,%rsp` with a register that calls change.
fn loads_stack_pointer(code: &[u8]) -> bool {
    let [prefix, opcode, modrm, ..] = *code else { return false };
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    let wide = prefix & 0xf8 == 0x48;
    let (high_reg, high_rm) = (prefix & 4 != 0, prefix & 1 != 0);
    // rax, rcx, rdx, rsi, rdi, r8 to r11
    let changed = |high: bool, low: u8| if high { low < 4 } else { matches!(low, 0..=2 | 6 | 7) };
    match opcode {
        0x8b if wide && !high_reg && reg == 4 && mode != 3 => rm != 4 && rm != 5,
        0x8b if wide && !high_reg && reg == 4 => changed(high_rm, rm),
        0x89 if wide && !high_rm && rm == 4 && mode == 3 => changed(high_reg, reg),
        _ => false,
    }
}

/// Returns true for `mov %rsp,(%reg)`, `mov %rsp,disp(%reg)`, or `mov %rsp,%rax`.
fn stores_stack_pointer(code: &[u8]) -> bool {
    let [prefix, 0x89, modrm] = *code else { return false };
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    prefix & 0xfc == 0x48 && reg == 4 && (mode != 3 && rm != 4 && rm != 5 || modrm == 0xe0)
}

/// A wait until no frame of code to be left is found on a suspended stack. Threads that have migrated bring no new frames.
pub(crate) struct SuspendedFrameWait<'w> {
    process: &'w Process,
    /// Reason why the program probably switches stacks by itself.
    why: String,
    forbidden: Forbidden,
    ledger: Option<Avma>,
    /// True if old code may continue to run.
    allowed: bool,
    deadline: Instant,
    reported: Option<String>,
}

impl<'w> SuspendedFrameWait<'w> {
    /// Prepares the wait for a transition of a process that switches stacks by itself; `ledger` as for [`search`].
    pub(crate) fn new(
        (process, why): (&'w Process, String),
        transition: &Transition,
        ledger: Option<Avma>,
        allowed: bool,
        deadline: Instant,
    ) -> Self {
        let forbidden = Forbidden::new(&transition.leave, &[], &[]);
        SuspendedFrameWait { process, why, forbidden, ledger, allowed, deadline, reported: None }
    }

    /// Searches once. Returns the time of the next search; `None` if there is no reason to wait.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after the deadline, or the process has ended.
    pub(crate) fn search(&mut self, report: &mut Report<'_>) -> Result<Option<Instant>, Error> {
        let (begun, why) = (Instant::now(), &self.why);
        let search = search(self.process, &self.forbidden, self.ledger)?;
        let Some(frame) = search.found else {
            if search.left > 0 {
                let left = search.left.div_ceil(1 << 20);
                report.warn(format!(
                    "{why}: {left} MiB were not searched for suspended frames, in which old code may continue to run"
                ));
            } else {
                let (why, searched_bytes) = (why.clone(), search.searched);
                report.event(patch::Event::SuspendedFramesSearched { why, searched_bytes });
            }
            return Ok(None);
        };
        let function = frame.describe();
        if self.allowed {
            report.warn(format!("{why}: old code may continue to run in {function}"));
            return Ok(None);
        }
        let tid = self.process.pid().leader();
        if Instant::now() > self.deadline {
            return Err(Error::TimedOut(vec![Busy { tid, function }]));
        }
        if self.reported.as_ref() != Some(&function) {
            report.event(patch::Event::ThreadBusy { tid: tid.0, function: function.clone() });
            self.reported = Some(function);
        }
        Ok(Some(
            (begun + begun.elapsed() * SEARCH_INTERVAL_RATIO).max(Instant::now() + SEARCH_PAUSE_MIN).min(self.deadline),
        ))
    }
}

/// Searches memory that may be a stack of the program for return addresses into that code. `ledger` is the address of our ledger, which is
/// not searched because it holds addresses of that code.
///
/// # Errors
/// The process has ended.
pub(crate) fn search(process: &Process, forbidden: &Forbidden, ledger: Option<Avma>) -> Result<Search, Error> {
    let (memory, mut pages) = (process.memory(), Pagemap::of(process.pid()));
    let end = Instant::now() + SEARCH_TIME_MAX;
    let (mut result, mut left_to_read) = (Search::default(), SEARCH_BYTES_MAX);
    let mut buffer = vec![0; MEMORY_CHUNK_LEN as usize];
    let is_ours = |mapping: &Mapping| ledger.is_some_and(|at| mapping.contains(at));
    let mappings = process.mappings()?;
    for (i, mapping) in mappings.iter().enumerate().filter(|(_, m)| may_hold_stacks(m) && !is_ours(m)) {
        let guard = i.checked_sub(1).map(|below| &mappings[below]).filter(|below| is_guard(below, mapping));
        let mut at = guard.map_or(mapping.start, |_| after_thread_stack(memory, mapping));
        while at < mapping.end {
            if !pages.is_held(at) {
                at = Avma(at.0 + PAGE);
                continue;
            }
            let mut to = at;
            while to < mapping.end && to.0 - at.0 < MEMORY_CHUNK_LEN && pages.is_held(to) {
                to = Avma(page_start(to.0) + PAGE);
            }
            let len = to.0.min(mapping.end.0) - at.0;
            if left_to_read < len || Instant::now() > end {
                result.left += len;
                at = to;
                continue;
            }
            left_to_read -= len;
            result.searched += len;
            let chunk = &mut buffer[..len as usize];
            let read = memory.read_some(at, chunk);
            let words = chunk[..read].as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            let hit = words.enumerate().find_map(|(i, word)| Some((i, forbidden.within(word)?)));
            if let Some((i, function)) = hit {
                let within = mapping.path.clone().unwrap_or_else(|| "anonymous memory".to_owned());
                result.found = Some(Frame { function: function.clone(), address: Avma(at.0 + 8 * i as u64), within });
                return Ok(result);
            }
            at = to;
        }
    }
    if process.is_alive() { Ok(result) } else { Err(Error::Ended(process.pid())) }
}

fn may_hold_stacks(mapping: &Mapping) -> bool {
    let special = mapping.path.as_deref().is_some_and(|path| path == "[stack]" || path.starts_with("/dev/"));
    // a shared file is not a stack; a module's data is private
    mapping.read && mapping.write && !special && !(mapping.shared && mapping.inode != 0)
}

/// Returns true if `below` guards the end of a stack. The kernel merges other memory with memory above a stack, but not here.
fn is_guard(below: &Mapping, mapping: &Mapping) -> bool {
    below.end == mapping.start && !below.read && !below.write && mapping.path.is_none() && !mapping.shared
}

/// Returns the first address after the stack of a thread, in use or kept for the next one: it ends in a control block, which begins with
/// its own address.
fn after_thread_stack(memory: &Memory, mapping: &Mapping) -> Avma {
    let from = Avma(mapping.start.0.max(mapping.end.0.saturating_sub(CONTROL_BLOCK_WITHIN)));
    let Ok(bytes) = memory.read_vec(from, (mapping.end.0 - from.0) as usize) else { return mapping.start };
    let words = bytes.as_chunks::<8>().0;
    let word = |i: usize| words.get(i).map(|word| u64::from_le_bytes(*word));
    let is_own = |i: &usize| {
        let address = from.0 + 8 * *i as u64;
        // `tcb` and `self` of glibc
        word(*i) == Some(address) && word(*i + 2) == Some(address)
    };
    (0..words.len()).find(is_own).map_or(mapping.start, |i| Avma(from.0 + 8 * i as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_searched_once_for_all_its_processes() {
        let searched = SearchCache::default();
        let mapped = |inode, id: u8, text: &[(u64, u64)]| (((8, 1), inode), Some(BuildId(vec![id; 20])), text.to_vec());
        let file = |inode, id| mapped(inode, id, &[(0x1000, 0x2000)]);
        let mut searches = 0;
        for _ in 0..3 {
            for (inode, id, answer) in [(7, 1, Some(Svma(0x1000))), (7, 2, None), (8, 1, None)] {
                let search = || {
                    searches += 1;
                    Ok(answer)
                };
                assert_eq!(searched.get_or_search(file(inode, id), search).unwrap(), answer);
            }
        }
        assert_eq!(searches, 3);
        // a process that has unmapped its text has no effect on others
        assert_eq!(searched.get_or_search(mapped(7, 1, &[]), || Ok(None)).unwrap(), None);
        assert_eq!(searched.get_or_search(file(7, 1), || unreachable!()).unwrap(), Some(Svma(0x1000)));
        searched.get_or_search(file(9, 9), || Err(io::Error::other("unreadable"))).unwrap_err();
        assert_eq!(searched.get_or_search(file(9, 9), || Ok(Some(Svma(1)))).unwrap(), Some(Svma(1)));
    }

    #[test]
    fn a_switch_across_two_reads_is_found() {
        let mut text = vec![0x90; TEXT_CHUNK_LEN as usize + 200];
        let at = TEXT_CHUNK_LEN as usize - 4;
        text[at..at + 7].copy_from_slice(b"\x48\x89\x27\x48\x8b\x26\xc3");
        let read = |from: u64, buf: &mut [u8]| {
            buf.copy_from_slice(&text[from as usize..][..buf.len()]);
            Ok::<_, io::Error>(buf.len())
        };
        assert_eq!(switch_in_text(text.len() as u64, read).unwrap(), Some(at as u64 + 3));
    }

    #[test]
    fn code_that_switches_stacks_is_told_from_code_of_compilers() {
        let switches: [&[u8]; 5] = [
            // mov %rsp,(%rdi); mov (%rsi),%rsp; ret
            b"\x48\x89\x27\x48\x8b\x26\xc3",
            // mov %rsp,8(%rdi); mov 8(%rsi),%rsp
            b"\x48\x89\x67\x08\x90\x90\x48\x8b\x66\x08",
            // mov %rsp,%rax; mov %rdi,%rsp
            b"\x48\x89\xe0\x48\x89\xfc",
            // mov %rsp,(%r8); mov %rsi,%rsp, by the other opcode
            b"\x49\x89\x20\x48\x8b\xe6",
            // mov %rsp,(%rdi); mov %r8,%rsp
            b"\x48\x89\x27\x4c\x89\xc4",
        ];
        for code in switches {
            let text = [&[0x90; 200], code, &[0x90; 200]].concat();
            assert!(switch_in(&text).is_some_and(|at| (200..200 + code.len()).contains(&at)), "{code:x?}");
        }
        let compiled: [&[u8]; 6] = [
            // push %rbp; mov %rsp,%rbp; ... mov %rbp,%rsp
            b"\x55\x48\x89\xe5\x48\x89\xec\x5d\xc3",
            // mov %rsp,%rbx; ... mov %rbx,%rsp (an array of variable length)
            b"\x48\x89\xe3\x48\x89\xdc",
            // mov %rsp,%rdi; call; leave
            b"\x48\x89\xe7\xe8\0\0\0\0\xc9\xc3",
            // mov 8(%rsp),%rdi; mov %rdi,8(%rsp)
            b"\x48\x8b\x7c\x24\x08\x48\x89\x7c\x24\x08",
            // a load without a store: longjmp
            b"\x48\x8b\x67\x30",
            // mov %rsp,(%rdi) alone
            b"\x48\x89\x27\xc3",
        ];
        for code in compiled {
            assert_eq!(switch_in(&[&[0x90; 200], code, &[0x90; 200]].concat()), None, "{code:x?}");
        }
        let far = [&b"\x48\x89\x27"[..], &[0x90; 300], b"\x48\x8b\x26"].concat();
        assert_eq!(switch_in(&far), None);
        assert_eq!(switch_in(b""), None);
        assert_eq!(switch_in(b"\x8b"), None);
    }
}
