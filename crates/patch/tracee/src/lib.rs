//! Controls a running process through `/proc` and ptrace, one thread at a time or all at once, without endangering it.
//!
//! # What the caller must guarantee
//!
//! - All work on a traced process is done inside [`attach`], and [`Session::pump`] is called whenever the caller waits: signals and new
//!   threads of the target wait for it.
//! - No other thread of the tool calls `waitpid` for a traced thread. Waiting for the exit of the target, if it is a child of the tool, is
//!   such a call.
//! - The bytes written into the target are correct there: [`FrozenProcess::write_text`] checks pages, not instructions.
//! - The real-time signal `SIGRTMAX - 1` is free: it interrupts waits that would not end.
//!
//! # What it guarantees
//!
//! - **The tool may be killed at any instruction; the target continues correctly.** The tool uses no option, and enters no state, that the
//!   kernel does not undo by itself when the tracer ends: no breakpoint, no single step, no `EXITKILL`. A thread in a remote call restores
//!   itself from a frame on its own stack. Text is written with one write per piece.
//! - **The target does not see a stop.** Interrupted system calls continue ([`Session::stop`] repairs those that would return `EINTR`).
//!   Signals arrive once, with the same information. Job control is kept; a process found stopped stays stopped. Two effects are visible.
//!   Relative time-outs of repaired calls start again ([`Session::idle_since_stop`] reports when not to stop). One such call returns
//!   `EINTR` if the tool is killed between its request to stop and the stop.
//! - While a thread is stopped the tracer runs before other threads, if it may. At every other time it runs like all others, and a caller
//!   that prepares ([`IdlePriority`]) runs after all others.
//! - Errors leave the threads running, or held by the value that still exists. [`Error::refused`] distinguishes refusals, made before any
//!   change, from failures; [`Error::gone`] reports that the target does not exist any more.
//! - Calls that a thread's seccomp filters would refuse are not made.
//!
//! # What it does not do
//!
//! It knows no patches, finds no symbols, unwinds no stacks, and does not judge if a thread may migrate. It neither traces workers that the
//! kernel keeps inside a process (io_uring), nor writes through them.
//!
//! ```text
//!              attach                 stop, freeze
//!   Process ------------> Session <------------------> Stopped, FrozenProcess
//!      ^                     |        drop, resume      |          ^
//!      |    the closure ends |             begin_remote v          | finish, drop
//!      +---------------------+                         Remote -----+
//! ```
//!
//! ```no_run
//! use stillpoint_patch_tracee::{Pid, Process, Stop, attach};
//! # fn main() -> Result<(), stillpoint_patch_tracee::Error> {
//! let process = Process::open(Pid(4711))?;
//! attach(&process, |session| {
//!     for tid in session.threads() {
//!         if let Stop::Stopped(mut thread) = session.stop(tid)? {
//!             println!("{tid} is stopped at {}", thread.registers()?.pc());
//!             println!("and was stopped for {} ns", thread.resume()?);
//!         }
//!     }
//!     Ok(())
//! })?
//! # }
//! ```
//!
//! Follows ptrace(2), signal(7), `kernel/ptrace.c`, `kernel/signal.c` and `arch/x86/kernel/signal_64.c` of Linux. The self-restoring remote
//! call is an idea of CRIU's compel.

mod bpf;
mod calling_process;
mod carrier;
mod error;
mod event;
mod frame;
mod freeze;
mod freezer;
mod gadgets;
mod ids;
pub mod launch;
mod maps;
mod memory;
mod module;
mod pagemap;
mod priority;
mod process;
mod registers;
mod remote;
mod restart;
mod seccomp;
mod session;
mod status;
mod stopped_thread;
mod sys;
mod tracer;
pub use error::Error;
pub use event::{Event, ProcessOrigin};
pub use freeze::{FrozenProcess, PartialFreeze};
pub use freezer::frozen_group;
pub use ids::{Pid, Tid};
pub use maps::{Mapping, mappings_of};
pub use memory::Memory;
pub use module::{Libc, Module, Segment, build_id_of, segments};
pub use pagemap::Pagemap;
pub use priority::IdlePriority;
pub use process::Process;
pub use registers::Registers;
pub use remote::Remote;
pub use session::{Session, Stop, StopRequest, attach};
pub use status::{Stat, Status, ThreadActivity, ThreadInfo};
pub use stopped_thread::{Stopped, StoppedThread};
pub use sys::now_ns;
