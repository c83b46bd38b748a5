//! Holds a program between its exec and its entry point, before its first instruction, and releases it.
//!
//! The obvious way to stop a program at its entry is a breakpoint. A tool that is killed leaves the breakpoint in the program, and the
//! program ends there. Here the program itself waits, in a *gate*: some instructions in the unused rest of the last page of the loader's
//! text. The loader jumps to the gate in place of the entry because the helper has changed `AT_ENTRY`. The gate reads one byte from a
//! socket whose other end the helper holds, closes the socket, and jumps to the entry. If the helper is killed, the kernel closes its end,
//! and the program continues by itself: unpatched, or not at all if patching had begun. No process traces it while it waits, so it can be
//! patched like any other program.
//!
//! ```text
//!  fork     exec         exec's stop: gate and AT_ENTRY written, let go       gate: read ... byte, or end of file
//!   |        |                |                                                |
//!   program ----------------------> loader: maps, relocates, constructors ----> waits ----------> _start
//!   helper  seizes ---------> lets go                                           patches, writes the byte
//! ```

mod credentials;
pub mod introduction;

use self::credentials::{Credentials, is_secure};
use crate::sys::Wait;
use crate::tracer::is_there;
use crate::{Error, Memory, Pid, Process, calling_process, maps, module, sys};
use std::io::{self, Write};
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_base::{Backoff, crosses_page};
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;

/// Answers to the gate. The end of the connection without an answer opens the gate, unless patching had begun.
const GO: u8 = b'g';
const GO_AND_KEEP: u8 = b'f';
const REFUSE: u8 = b'x';

/// The gate, executable at any address. Its data follow it: the entry, the descriptor, the flag that patching has begun.
#[rustfmt::skip]
const GATE: [u8; 104] = [
    0x57, 0x56, 0x52,                                     //    0  push %rdi; push %rsi; push %rdx
    0x8b, 0x3d, 0x67, 0x00, 0x00, 0x00,                   //    3  mov DESCRIPTOR, %edi
    0x48, 0x8d, 0x74, 0x24, 0xf0,                         //    9  lea -16(%rsp), %rsi
    0xba, 0x01, 0x00, 0x00, 0x00,                         //   14  mov $1, %edx
    0x31, 0xc0,                                           //   19  xor %eax, %eax
    0x0f, 0x05,                                           //   21  syscall             read one byte
    0x48, 0x83, 0xf8, 0xfc, 0x74, 0xe6,                   //   23  cmp $-EINTR, %rax; je 3
    0x48, 0x83, 0xf8, 0x01, 0x75, 0x1a,                   //   29  cmp $1, %rax; jne 61
    0x8a, 0x44, 0x24, 0xf0,                               //   35  mov -16(%rsp), %al
    0x3c, GO_AND_KEEP, 0x74, 0x2d,                        //   39  cmp $'f', %al; je 88
    0x3c, GO, 0x74, 0x1c,                                 //   43  cmp $'g', %al; je 75
    0xbf, REFUSED as u8, 0x00, 0x00, 0x00,                //   47  mov $REFUSED, %edi
    0xb8, 0xe7, 0x00, 0x00, 0x00, 0x0f, 0x05, 0xeb, 0xf7, //   52  exit_group
    0xbf, ABANDONED as u8, 0x00, 0x00, 0x00,              //   61  mov $ABANDONED, %edi
    0x83, 0x3d, 0x2b, 0x00, 0x00, 0x00, 0x00, 0x75, 0xe9, //   66  cmpl $0, TOUCHED; jne 52
    0x8b, 0x3d, 0x1f, 0x00, 0x00, 0x00,                   //   75  mov DESCRIPTOR, %edi
    0xb8, 0x03, 0x00, 0x00, 0x00, 0x0f, 0x05,             //   81  close
    0x5a, 0x5e, 0x5f,                                     //   88  pop %rdx; pop %rsi; pop %rdi
    0xff, 0x25, 0x07, 0x00, 0x00, 0x00,                   //   91  jmp *ENTRY
    0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00,             //   97  nop
];
/// Offset of the instruction after the `syscall` that waits.
const WAITS_AT: u64 = 23;
const TOUCHED_AT: u64 = GATE.len() as u64 + 12;
const LEN: usize = GATE.len() + 16;

/// Exit code of a program that was refused at its gate.
pub const REFUSED: i32 = 3;
/// Exit code of a program whose helper was killed while it patched: a half-patched program must not run.
pub const ABANDONED: i32 = 75;

const PT_LOAD: u32 = 1;
const EXECUTABLE: u32 = 1;
const AT_NULL: u64 = 0;
/// Maximum pause between two checks of a program that runs.
const PAUSE_MAX: Duration = Duration::from_millis(2);
/// Largest size of arguments and environment on a stack that is searched, in bytes.
const STACK_MAX: usize = 64 << 20;

/// The two sides of [`split`].
#[derive(Debug)]
pub enum Side {
    /// The caller, which will become the program.
    Program(Waiting),
    /// A separate process, which is not a child of the program.
    Helper(Program),
}

/// A process that will become a program, and its helper's connection to it.
#[derive(Debug)]
pub struct Program {
    pid: Pid,
    /// `None` in a helper that was just forked: in the program's sandbox the call may be one that kills.
    pidfd: Option<OwnedFd>,
    channel: UnixStream,
    /// Number of the descriptor of the program's end, in the program.
    descriptor: RawFd,
    /// Credentials that the program must not exceed, if the process may be less privileged than its helper.
    credentials: Option<Credentials>,
}

impl Program {
    /// Returns the number of the process.
    pub fn pid(&self) -> Pid {
        self.pid
    }
}

/// The program's side before its exec.
#[derive(Debug)]
pub struct Waiting {
    channel: UnixStream,
}

impl Waiting {
    /// Takes the program's end of a connection to a helper.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated.
    pub fn on(channel: UnixStream) -> io::Result<Waiting> {
        // Avoids the numbers that a script wrapper may use itself.
        let high = calling_process::duplicate_high(channel)?;
        Ok(Waiting { channel: high.into() })
    }

    /// Returns the number of the descriptor, which stays open over an exec.
    pub fn descriptor(&self) -> RawFd {
        self.channel.as_raw_fd()
    }

    /// Answers a helper that is not our parent (see [`introduction`]); `strict`: all patches must be active.
    ///
    /// # Errors
    /// The helper closes the connection, or sends nothing for ten seconds.
    pub fn introduce(&mut self, strict: bool) -> io::Result<()> {
        self.channel.set_read_timeout(Some(introduction::HELPER_TIMEOUT))?;
        introduction::introduce(&mut self.channel, strict)
    }

    /// Waits until the helper reports that it follows; returns false if the helper has ended or cannot follow.
    pub fn ready(&mut self) -> bool {
        let mut byte = [0];
        let said = io::Read::read(&mut self.channel, &mut byte);
        // The time-out is a property of the socket, and the gate must wait without limit.
        let unlimited = self.channel.set_read_timeout(None);
        matches!((said, unlimited), (Ok(1), Ok(()))) && byte == *b"r"
    }

    /// Leaves the descriptor open for the gate.
    pub fn keep(self) {
        let _ = OwnedFd::from(self.channel).into_raw_fd();
    }
}

/// Makes a helper process from the calling one: a grandchild, so that the program that the caller becomes has no unknown child. The helper
/// keeps standard input, output and error, and no other descriptor.
///
/// # Errors
/// The connection or the helper cannot be made. In the helper: its descriptors cannot be closed.
pub fn split() -> io::Result<Side> {
    let (program_end, helper_end) = UnixStream::pair()?;
    let waiting = Waiting::on(program_end)?;
    let descriptor = waiting.descriptor();
    let pid = Pid(std::process::id() as i32);
    if calling_process::fork_grandchild()? {
        drop(waiting);
        let helper_end = calling_process::keep_only(helper_end.into())?;
        let program = Program { pid, pidfd: None, channel: helper_end.into(), descriptor, credentials: None };
        return Ok(Side::Helper(program));
    }
    Ok(Side::Program(waiting))
}

/// Becomes `program`. Environment, descriptors, signal mask and ignored signals are those with which this process was started. Returns only
/// on failure.
pub fn become_program(program: &std::ffi::OsStr, arguments: &[std::ffi::OsString]) -> io::Error {
    calling_process::undo_runtime();
    calling_process::exec(program, arguments)
}

/// Returns true if a program gains privileges at its exec (set-user-id, file capabilities) that the kernel would withhold because a caller
/// without privileges traces it.
pub fn gains_privileges(program: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let set_id = program.metadata().is_ok_and(|m| m.is_file() && m.mode() & 0o6000 != 0);
    !rustix::process::geteuid().is_root() && (set_id || calling_process::has_file_capabilities(program))
}

/// State that a followed program has reached.
#[derive(Debug)]
pub enum LaunchState {
    /// It waits in its gate: libraries are mapped and relocated, the entry was not reached.
    Gate(Gate),
    /// The program has no gate, for this reason. It is stopped before its very first instruction until [`Launch::next`] is called again.
    WithoutGate(String),
    /// It has ended.
    Ended,
    /// Nothing happened in time; the program is still followed.
    TimedOut,
}

/// A process that is followed to its next exec, and from there to its entry. It is not sent between OS threads: the thread that seized must
/// be the one that waits.
#[derive(Debug)]
pub struct Launch {
    program: Program,
    pidfd: OwnedFd,
    /// The file that the descriptor refers to, in the program.
    link: PathBuf,
    /// True if it is stopped in the exec stop.
    in_exec_stop: bool,
    _not_send: PhantomData<*const ()>,
}

impl Launch {
    /// Seizes a process that is about to call exec, without stopping it.
    ///
    /// # Errors
    /// The process may not be traced, is already traced, or has ended. It continues.
    pub fn follow(mut program: Program) -> Result<Launch, Error> {
        let pid = program.pid;
        let pidfd = match program.pidfd.take() {
            Some(pidfd) => pidfd,
            None => sys::pidfd_open(pid.0).map_err(|_| Error::Gone(pid))?,
        };
        let link = kernel_files::link(format!("/proc/{pid}/fd/{}", program.descriptor))
            .map_err(|source| Error::Os { call: "reading a descriptor", id: pid.0, source })?;
        rehearse();
        let launch = Launch { program, pidfd, link, in_exec_stop: false, _not_send: PhantomData };
        launch.seize()?;
        Ok(launch)
    }

    fn seize(&self) -> Result<(), Error> {
        sys::seize_for_exec(self.program.pid.0).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => {
                let hint = "the kernel lets no helper trace it (ptrace_scope, or an unprivileged sandbox)".to_owned();
                Error::Permission { pid: self.program.pid, hint }
            }
            Some(libc::ESRCH) => Error::Gone(self.program.pid),
            _ => Error::Os { call: "PTRACE_SEIZE", id: self.program.pid.0, source },
        })?;
        // The number was its own if it is still alive. Another process continues, and is released when this thread ends.
        if sys::has_ended(&self.pidfd) { Err(Error::Gone(self.program.pid)) } else { Ok(()) }
    }

    /// Reports to the program that it is followed: it may call exec now.
    ///
    /// # Errors
    /// The program has closed the connection.
    pub fn ready(&mut self) -> io::Result<()> {
        self.program.channel.write_all(b"r")
    }

    /// Follows the program to its next exec and to its gate. On an error the program continues, unfollowed.
    ///
    /// # Errors
    /// The process cannot be waited for, read or resumed; [`Error::GainsPrivileges`] if its new program must not be traced.
    pub fn next(mut self, deadline: Instant) -> Result<(LaunchState, Option<Launch>), Error> {
        if std::mem::take(&mut self.in_exec_stop) {
            self.go(sys::cont(self.program.pid.0, 0))?;
        }
        let mut pause = Backoff::new(Duration::from_micros(50), PAUSE_MAX);
        loop {
            match sys::wait(self.program.pid.0, false) {
                Ok(Some(Wait::Event(libc::PTRACE_EVENT_EXEC))) => break,
                Ok(Some(Wait::Ended(_))) => return Ok((LaunchState::Ended, None)),
                Ok(Some(other)) => self.pass_on(other)?,
                Ok(None) if Instant::now() >= deadline => return Ok((LaunchState::TimedOut, Some(self))),
                Ok(None) => std::thread::sleep(pause.next_wait()),
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok((LaunchState::Ended, None)),
                Err(source) => return Err(Error::Os { call: "waitpid", id: self.program.pid.0, source }),
            }
        }
        if self.has_gained_privileges()? {
            self.go(sys::detach(self.program.pid.0))?;
            return Err(Error::GainsPrivileges(self.program.pid));
        }
        match self.set_gate()? {
            Err(why) => {
                self.in_exec_stop = true;
                Ok((LaunchState::WithoutGate(why), Some(self)))
            }
            Ok(place) => {
                self.go(sys::detach(self.program.pid.0))?;
                self.await_gate(place, deadline)
            }
        }
    }

    /// Kills the program.
    pub fn kill(self) {
        sys::kill(&self.pidfd);
    }

    fn pass_on(&mut self, wait: Wait) -> Result<(), Error> {
        let pid = self.program.pid.0;
        self.go(match wait {
            Wait::Signal(signal) => sys::cont(pid, signal),
            Wait::Trap { group_stop: true } => sys::listen(pid),
            _ => sys::cont(pid, 0),
        })
    }

    /// Ignores ESRCH: the next wait reports a program that was killed while it was stopped.
    fn go(&self, result: io::Result<()>) -> Result<(), Error> {
        is_there(result, "ptrace", self.program.pid.0).map(drop)
    }

    /// Returns true if a program in the exec stop has privileges that its process lacked before. The kernel honours set-user-id bits and
    /// file capabilities here because the tracer is privileged.
    fn has_gained_privileges(&mut self) -> Result<bool, Error> {
        let Some(before) = &self.program.credentials else { return Ok(false) };
        let pid = self.program.pid;
        let os = |source| Error::Os { call: "reading credentials", id: pid.0, source };
        let after = Credentials::of(pid).map_err(os)?;
        let vector = kernel_files::bytes(format!("/proc/{pid}/auxv")).map_err(os)?;
        let gained = before.are_exceeded_by(&after) || is_secure(&vector);
        self.program.credentials = Some(after);
        Ok(gained)
    }

    /// Writes the gate and redirects the loader to it, while the program is in the exec stop; returns the reason if that is impossible.
    fn set_gate(&self) -> Result<Result<Place, String>, Error> {
        let pid = self.program.pid;
        let os = |call| move |source| Error::Os { call, id: pid.0, source };
        if kernel_files::link(format!("/proc/{pid}/fd/{}", self.program.descriptor)).ok().as_ref() != Some(&self.link) {
            return Ok(Err("what called it has closed the descriptors that it did not know".to_owned()));
        }
        let exe = kernel_files::open(format!("/proc/{pid}/exe")).map_err(os("opening exe"))?;
        let mut head = [0; 64];
        let len = exe.read_at(&mut head, 0).unwrap_or(0);
        if let module::Class::Other(what) = module::classify(&head[..len]) {
            return Ok(Err(format!("it is {what}")));
        }
        if !module::has_interpreter(&exe, &head) {
            return Ok(Err("it is a static program: it has no loader".to_owned()));
        }
        let file = kernel_files::open_to_change(format!("/proc/{pid}/mem"));
        let memory = Memory::new(pid, file.map_err(os("opening mem"))?);
        let stack = Avma(sys::registers(pid.0).map_err(os("PTRACE_GETREGS"))?.rsp);
        let Some((entry_at, entry, base)) = auxiliary(&memory, stack) else {
            return Ok(Err("its auxiliary vector cannot be read".to_owned()));
        };
        let text = kernel_files::text(format!("/proc/{pid}/maps")).map_err(os("reading maps"))?;
        let Some(at) = maps::parse(&text).ok().and_then(|mappings| room(&mappings, &memory, base)) else {
            return Ok(Err("the text of its loader ends without room for a gate".to_owned()));
        };
        let mut gate = GATE.to_vec();
        gate.extend(entry.0.to_le_bytes());
        gate.extend(self.program.descriptor.to_le_bytes());
        gate.extend([0; 4]);
        // In this order: a gate to which no jump leads has no effect.
        memory.write_through(pid.0, at, &gate)?;
        memory.write_through(pid.0, entry_at, &at.0.to_le_bytes())?;
        Ok(Ok(Place { at, entry_at, entry }))
    }

    fn await_gate(self, place: Place, deadline: Instant) -> Result<(LaunchState, Option<Launch>), Error> {
        let mut pause = Backoff::new(Duration::from_micros(100), PAUSE_MAX);
        loop {
            // "0 0x3db 0x... sp pc": it waits in the read of its gate.
            let call = kernel_files::text(format!("/proc/{}/syscall", self.program.pid)).unwrap_or_default();
            let waits_at = format!("{:#x}", place.at.0 + WAITS_AT);
            if call.starts_with("0 ") && call.split_whitespace().next_back() == Some(&waits_at) {
                break;
            }
            if sys::has_ended(&self.pidfd) {
                return Ok((LaunchState::Ended, None));
            }
            if Instant::now() >= deadline {
                return Ok((LaunchState::TimedOut, None));
            }
            std::thread::sleep(pause.next_wait());
        }
        Ok((LaunchState::Gate(Gate { place, launch: self, touched: false }), None))
    }
}

#[derive(Debug, Clone, Copy)]
struct Place {
    at: Avma,
    /// Address from which the program reads its entry, and the entry itself.
    entry_at: Avma,
    entry: Avma,
}

/// A program that waits before its first instruction and that no process traces.
#[derive(Debug)]
pub struct Gate {
    place: Place,
    launch: Launch,
    touched: bool,
}

impl Gate {
    /// Returns the number of the program.
    pub fn pid(&self) -> Pid {
        self.launch.program.pid
    }

    /// Opens the program.
    ///
    /// # Errors
    /// As [`Process::open`]; also [`Error::Gone`] if another process has the program's number now.
    pub fn process(&self) -> Result<Process, Error> {
        let process = Process::open(self.pid())?;
        if sys::has_ended(&self.launch.pidfd) { Err(Error::Gone(self.pid())) } else { Ok(process) }
    }

    /// Marks the program as being patched: from now on it does not run unless [`Gate::open`] is called.
    ///
    /// # Errors
    /// [`Error::Memory`] if the mark cannot be written: the program may still run unpatched.
    pub fn touch(&mut self, process: &Process) -> Result<(), Error> {
        self.touched = true;
        process.memory().write(Avma(self.place.at.0 + TOUCHED_AT), &1u32.to_le_bytes())
    }

    /// Lets the program run.
    ///
    /// # Errors
    /// The auxiliary vector cannot be restored, or the program does not take the answer.
    pub fn open(mut self, process: &Process) -> Result<(), Error> {
        self.restore(process)?;
        self.answer(GO)
    }

    /// Ends the program with [`REFUSED`].
    ///
    /// # Errors
    /// The program does not take the answer: it has ended.
    pub fn refuse(mut self) -> Result<(), Error> {
        self.answer(REFUSE)
    }

    /// Lets the program run, and follows it to its next exec.
    ///
    /// # Errors
    /// As [`Gate::open`]; also if the program cannot be seized.
    pub fn open_and_follow(mut self, process: &Process) -> Result<Launch, Error> {
        self.restore(process)?;
        self.launch.seize()?;
        self.answer(GO_AND_KEEP)?;
        Ok(self.launch)
    }

    /// Restores the auxiliary vector, which the program can read: it must not show the gate.
    fn restore(&self, process: &Process) -> Result<(), Error> {
        process.memory().write_u64(self.place.entry_at, self.place.entry.0)
    }

    fn answer(&mut self, answer: u8) -> Result<(), Error> {
        let id = self.launch.program.pid.0;
        self.launch.program.channel.write_all(&[answer]).map_err(|source| Error::Os { call: "answering", id, source })
    }
}

/// Makes, without effect, the calls that patching makes later and for which a sandbox may kill. A helper that is killed now leaves a
/// program that runs; one that is killed later leaves a program that does not.
fn rehearse() {
    let tries = || {
        let _ = sys::WaitTimer::new();
        sys::set_fifo_class(0);
        sys::set_default_class(0);
        let own = std::process::id() as i32;
        let _ = sys::same_memory(own, own);
    };
    // On a thread of its own: lasting effects apply only to that thread.
    let _ = std::thread::spawn(tries).join();
}

/// Returns the address of the entry in the auxiliary vector on a new program's stack, the entry, and the address of the loader.
fn auxiliary(memory: &Memory, stack: Avma) -> Option<(Avma, Avma, Avma)> {
    let mut words = vec![0; 64 << 10];
    loop {
        let len = memory.read_some(stack, &mut words);
        let read: Vec<u64> = words[..len].as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect();
        if let Some((at, entry, base)) = auxiliary_in(&read) {
            return Some((Avma(stack.0 + 8 * at as u64), Avma(entry), Avma(base)));
        }
        if len < words.len() || len >= STACK_MAX {
            return None;
        }
        words.resize(2 * len, 0);
    }
}

/// Searches the words of a new stack (count, arguments, 0, environment, 0, pairs); returns index of the entry, entry, loader.
fn auxiliary_in(words: &[u64]) -> Option<(usize, u64, u64)> {
    let arguments = usize::try_from(*words.first()?).ok()?;
    let environment = arguments.checked_add(2)?;
    let pairs = environment + words.get(environment..)?.iter().position(|w| *w == 0)? + 1;
    let (mut entry, mut base) = (None, None);
    for (i, pair) in words.get(pairs..)?.as_chunks::<2>().0.iter().enumerate() {
        match pair[0] {
            AT_NULL => return Some((entry?, words[entry?], base?)),
            libc::AT_ENTRY => entry = Some(pairs + 2 * i + 1),
            libc::AT_BASE => base = Some(pair[1]),
            _ => {}
        }
    }
    None
}

/// Returns the unused rest of the last page of an executable segment: the loader's, otherwise the program's.
fn room(mappings: &[crate::Mapping], memory: &Memory, base: Avma) -> Option<Avma> {
    let mut modules = module::find(mappings, memory, 0, None);
    modules.sort_by_key(|m| !m.contains(base));
    modules.iter().find_map(|m| rest_of_text(m, memory))
}

fn rest_of_text(module: &crate::Module, memory: &Memory) -> Option<Avma> {
    let head = module.mappings.first()?.start;
    for segment in module::segments(memory, head).ok()? {
        if segment.kind != PT_LOAD || segment.flags & EXECUTABLE == 0 {
            continue;
        }
        // A gap of some bytes, so that the gate does not look like the end of the last function.
        let at =
            Avma((module.bias.wrapping_add(segment.address).wrapping_add(segment.file_len) + 16).next_multiple_of(16));
        let mapping = module.mappings.iter().find(|m| m.contains(at) && m.execute && m.read && !m.write)?;
        let mut bytes = vec![0; LEN];
        let inside = !crosses_page(at.0, LEN) && at.0 + LEN as u64 <= mapping.end.0;
        if inside && memory.read(at, &mut bytes).is_ok() && bytes.iter().all(|b| *b == 0) {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_entry_on_a_stack() {
        let stack = [2, 100, 200, 0, 300, 0, 6, 4096, libc::AT_ENTRY, 77, libc::AT_BASE, 88, 0, 0];
        assert_eq!(auxiliary_in(&stack), Some((9, 77, 88)));
        assert_eq!(auxiliary_in(&stack[..11]), None);
        assert_eq!(auxiliary_in(&[u64::MAX, 0, 0]), None);
        assert_eq!(auxiliary_in(&[]), None);
    }

    #[test]
    fn jumps_of_the_gate_land_where_they_should() {
        let short = |at: usize| (at as i64 + 2 + i64::from(GATE[at + 1] as i8)) as usize;
        assert_eq!([short(27), short(33), short(41), short(45), short(59), short(73)], [3, 61, 88, 75, 52, 52]);
        let data = |at: usize, end: usize| end + GATE[at] as usize - GATE.len();
        assert_eq!([data(5, 9), data(77, 81), data(93, 97), data(68, 73)], [8, 8, 0, 12]);
        assert_eq!(GATE[WAITS_AT as usize - 2..][..2], [0x0f, 0x05]);
    }
}
