//! userfaultfd: places pages in other processes when they touch them, with a log that outlives the serving process.
//!
//! **The caller must** serve a [`Memory`] from one process at a time; read an event through [`Log::read`] only, and
//! only when all consequences of earlier ones are complete; record in the [`Log`] each close, before and after.
//!
//! **Guaranteed:** a page never replaces one that is resident. An event that was read from the kernel is in the log,
//! even when the reader was killed in the same instant. As long as one of the processes that [`fork_sharing_descriptors`] made lives, no
//! memory loses its userfaultfd, so no thread that waits reads zeros.
//!
//! **It does not** know the source of pages, nor watch other processes.
//!
//! ```text
//!  kernel --event--> [log] --> serve --keep--> replayed by the next one
//!                                  \--pass--> forgotten (a fault: its retry finds the page resident)
//! ```
//!
//! ```no_run
//! use stillpoint_kernel_sys::uffd::{Event, Log, Memory, Record};
//! # fn main() -> Result<(), stillpoint_kernel_sys::uffd::Error> {
//! # let descriptor = 5;
//! let (log, memory) = (Log::new(1 << 16)?, Memory::of(descriptor));
//! log.append(Record::Memory { pid: 4121, memory })?;
//! if let Some(Event::Fault(address)) = log.read(0, memory)? {
//!     memory.copy(address & !4095, &[0x5a; 4096])?;
//!     log.discard()?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Follows `Documentation/admin-guide/mm/userfaultfd.rst` of Linux and section 5.1 of "Instant OS Updates via Userspace
//! Checkpoint-and-Restart" (ATC 2016), whose mapped image restores given-up pages.

mod error;
mod event;
mod fork;
mod huge;
mod log;
mod memory;

pub use error::Error;
pub use event::Event;
pub use fork::fork_sharing_descriptors;
pub use huge::{HUGE_PAGE, collapse};
pub use log::{Log, Record};
pub use memory::{Memory, PutOutcome};
