//! Puts live patches into running processes and takes them back, thread by thread, without ever endangering them.
//!
//! The caller guarantees that the patch file was decoded by `stillpoint-patch-format`, that it may trace the process
//! (root, or the same user where the kernel allows that), and that whatever policy there is about signatures was
//! applied. Everything else is checked here, before anything is touched: build-id, the bytes of every function, what
//! else stands at its entry, the C library, the room, the symbols.
//!
//! The crate guarantees
//! - that every thread runs all old or all new code: it goes over when no patched function is on its stack, alone, by
//!   one store into a word of its own control block, while the others run on;
//! - that a failure leaves the old side in force ([`Error::landing`] says where the service is), that a time-out only
//!   ever leads back, and that nothing of a patch is unmapped, or used for anything but the same patch again;
//! - that being killed at any instruction leaves the process running correctly: each step is in the [`ledger`], which
//!   lies in the target, before it is done, and the next call completes the transition or takes it back.
//!
//! It does not order two threads that hand data to each other, nor calls made one after the other by an unchanged
//! caller (a patch states that by its scope and by functions that must be off the stack). Frames on stacks that are not a
//! thread's own are searched for in programs that seem to switch stacks by themselves, within limits; programs that import
//! `swapcontext` or `makecontext` are refused.
//!
//! ```text
//! check ── inject ── begin ── arm ── migrate ── commit          entry:  jmp dispatcher ── jmp new
//!                               └──────┴── abort ── restore              original bytes, or the jump that stood there
//! ```
//! An entry's dispatcher obeys one state byte of the transition (2 all old, 0 each thread by its word, 1 all new); writing
//! that byte is the commit point, also for threads yet to be born. Reverting and replacing are transitions like applying.
//!
//! ```no_run
//! use stillpoint_patch_engine::{Options, apply};
//! use stillpoint_patch_tracee::Pid;
//! let signed = stillpoint_patch_format::decode(&std::fs::read("fix.patch")?)?;
//! apply(Pid(4121), &signed, &Options::default(), &mut |event| println!("{event:?}"))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Follows WfPatch (OSDI 2020, section 3) in what a thread sees, and the kernel's livepatch consistency model in how a
//! thread is judged; without a modified kernel.
#![forbid(unsafe_code)]

mod again;
mod arena;
mod barrier;
mod calm;
mod check;
mod debuggers;
mod entries;
mod error;
mod fault;
pub mod fleet;
mod generation;
mod guide;
mod image;
mod inject;
pub mod ledger;
pub mod link;
mod memory_limit;
mod operate;
mod place;
mod plan;
mod prepare;
mod probe;
mod report;
mod resolve;
mod scan;
mod status;
mod store;
mod suspended;
mod transition;
mod walk;
mod word;

pub use barrier::{Asked, Name, Part, Points, ThreadState, abi};
pub use check::{Prediction, check};
pub use debuggers::{DebuggerFiles, debugger_files};
pub use error::{Busy, Error, Landing};
pub use fault::FaultPoint;
pub use generation::{Generation, ThreadView};
pub use operate::{Options, Outcome, Quiescence, Which, apply, recover_only, revert};
pub use report::{Observer, now_ns};
pub use status::{EntryStatus, PatchStatus, Status, ThreadStatus, Unfinished, peek, status};
pub use stillpoint_patch_tracee::GivingWay;
