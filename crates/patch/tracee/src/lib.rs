//! Holds a running process through `/proc` and ptrace, one thread at a time or all at once, without endangering it.
//!
//! # What the caller must guarantee
//!
//! - All work on a traced process is done inside of [`attach`], and [`Session::pump`] is called whenever the caller
//!   waits: the target's signals and newborn threads wait for it.
//! - No other thread of the tool calls `waitpid` for a thread that is traced. Waiting for the target's own exit, when it
//!   is a child of the tool, is such a call.
//! - What is written into the target makes sense there: [`Frozen::write_text`] checks pages, not instructions.
//! - The real-time signal `SIGRTMAX - 1` is free: it interrupts waits that would be for ever.
//!
//! # What it guarantees
//!
//! - **Being killed at any instruction leaves the target running correctly.** No option is used, and no state entered,
//!   that the kernel does not undo by itself when the tracer dies: no breakpoint, no single step, no `EXITKILL`. A
//!   thread in a remote call restores itself from a frame on its own stack. Text is written with one write per piece.
//! - **Stopping shows nowhere.** Interrupted system calls go on ([`Session::stop`] mends those that would return
//!   `EINTR`); signals arrive once, with the same information; job control is kept; a process found stopped stays so.
//!   What shows after all: relative time-outs of the mended calls begin anew ([`Session::idle_since_stop`] says when
//!   not to stop), and one `EINTR` of a call that is mended otherwise, if the tool is killed between its request to stop
//!   and the stop.
//! - While a thread stands the tracer runs before others, where it may; at every other time like everybody else, and a
//!   caller that prepares ([`GivingWay`]) after everybody else.
//! - Errors leave the threads running, or held by the value that still exists. [`Error::refused`] tells refusals, made
//!   before anything was touched, from failures; [`Error::gone`] tells that there is nobody left to care for.
//! - Calls that a thread's seccomp filters would not let through are not made.
//!
//! # What it does not do
//!
//! It knows no patches, finds no symbols, unwinds no stacks, and never judges whether a thread may migrate. It neither
//! traces nor stores through workers that the kernel keeps inside of a process (io_uring).
//!
//! ```text
//!              attach                 stop, freeze
//!   Process ------------> Session <------------------> Stopped, Frozen
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
//!             println!("{tid} stands at {}", thread.registers()?.pc());
//!             println!("and stood for {} ns", thread.resume()?);
//!         }
//!     }
//!     Ok(())
//! })?
//! # }
//! ```
//!
//! Follows ptrace(2), signal(7), `kernel/ptrace.c`, `kernel/signal.c` and `arch/x86/kernel/signal_64.c` of Linux; the
//! self-restoring remote call is the idea of CRIU's compel.

mod bpf;
mod carrier;
mod early;
mod error;
mod frame;
mod freeze;
mod ids;
pub mod launch;
mod maps;
mod memory;
mod module;
mod own;
mod pagemap;
mod priority;
mod process;
mod registers;
mod remote;
mod restart;
mod seccomp;
mod session;
mod status;
mod stopped;
mod sys;
mod tracer;
pub use error::Error;
pub use freeze::{Freezing, Frozen};
pub use ids::{Pid, Tid};
pub use maps::Mapping;
pub use memory::Memory;
pub use module::{Libc, Module};
pub use pagemap::Pagemap;
pub use priority::GivingWay;
pub use process::Process;
pub use registers::Registers;
pub use remote::Remote;
pub use session::{Asked, Birth, Event, Session, Stop, attach};
pub use status::{Status, ThreadActivity, ThreadInfo};
pub use stopped::{Held, Stopped};
