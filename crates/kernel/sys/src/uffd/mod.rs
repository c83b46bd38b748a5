//! userfaultfd: pages put into other processes when they touch them, and a log that outlives whoever puts them.
//!
//! **The caller must** serve a [`Memory`] from one process at a time; read an event through [`Log::read`] only, and only when
//! everything that follows from earlier ones has been done; note in the [`Log`] what it closes, before and after.
//!
//! **Guaranteed:** a page is never put over one that is there. An event that was taken from the kernel is in the log, even
//! when the reader was killed in the same instant. As long as one of the processes that [`split`] made lives, no memory
//! loses its userfaultfd, so none that waits ever reads zeros.
//!
//! **It does not** know where pages come from, nor watch over anybody.
//!
//! ```text
//!  kernel --event--> [log] --> serve --keep--> replayed by the next one
//!                                  \--pass--> forgotten (a fault: asked again, it finds the page there)
//! ```
//!
//! ```no_run
//! use stillpoint_kernel_sys::uffd::{Event, Log, Memory, Record};
//! # fn main() -> Result<(), stillpoint_kernel_sys::uffd::Error> {
//! # let descriptor = 5;
//! let (log, memory) = (Log::new(1 << 16)?, Memory::of(descriptor));
//! log.append(Record::Memory { pid: 4121, memory })?;
//! if let Some(Event::Fault { address }) = log.read(0, memory)? {
//!     memory.copy(address & !4095, &[0x5a; 4096])?;
//!     log.pass()?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Follows `Documentation/admin-guide/mm/userfaultfd.rst` of Linux and section 5.1 of "Instant OS Updates via Userspace
//! Checkpoint-and-Restart" (ATC 2016), whose mapped image brings given-up pages back.

mod error;
mod event;
mod huge;
mod log;
mod memory;
mod split;

pub use error::Error;
pub use event::Event;
pub use huge::{HUGE_PAGE, collapse};
pub use log::{Log, Record};
pub use memory::{Memory, Put};
pub use split::split;
