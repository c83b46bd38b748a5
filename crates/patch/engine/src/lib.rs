//! Applies live patches to running processes and reverts them, thread by thread, without endangering the processes.
//!
//! The caller guarantees three things. `stillpoint-patch-format` has decoded the patch file. The caller may trace the process (as root, or
//! as the same user if the kernel allows that). The policy for signatures was applied. Everything else is checked here before anything is
//! changed: build-id, the bytes of every function, other code at its entry, the C library, the room, the symbols.
//!
//! The crate guarantees
//! - that every thread runs all old or all new code: it migrates alone when no patched function is on its stack, by one store to a word of
//!   its own control block, while the other threads run;
//! - that a failure leaves the old side active ([`Error::service_state`] returns the state of the service), that a time-out only leads to a
//!   rollback, and that no memory of a patch is unmapped, or reused except for the same patch;
//! - that the process continues correctly if the tool is killed at any instruction: each step is recorded in the [`ledger`], which is
//!   located in the target, before it is done, and the next call completes the transition or rolls it back.
//!
//! It does not order two threads that pass data to each other, nor successive calls by an unchanged caller (a patch states such needs by
//! its scope and by functions that must not be on the stack). In programs that seem to switch stacks by themselves, frames on other stacks
//! than those of threads are searched for, within limits. Programs that import `swapcontext` or `makecontext` are refused if they exceed the limits.
//!
//! ```text
//! check ── inject ── begin ── arm ── migrate ── decide ── commit     entry:  jmp dispatcher ── jmp new
//!                    abort ── disarm ── move back ┘                          original bytes, or the jump that was there
//! ```
//! An entry's dispatcher obeys one state byte of the transition (2 all old, 0 each thread by its word, 1 all new). Writing that byte is the
//! commit point, also for future threads. Revert and replace are transitions like apply. `apply/phases.rs` has the list of phases;
//! `trampoline/` and `generation/` are its two mechanisms.
//!
//! ```no_run
//! use stillpoint_patch_engine::{Options, apply};
//! use stillpoint_patch_tracee::Pid;
//! let signed = stillpoint_patch_format::decode(&std::fs::read("fix.patch")?)?;
//! apply(Pid(4121), &signed, &Options::default(), &mut |event| println!("{event:?}"))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Follows WfPatch (OSDI 2020, section 3) for the view of a thread, and the kernel's livepatch consistency model for the check of a thread;
//! it needs no modified kernel.
#![forbid(unsafe_code)]

mod apply;
mod data_change;
mod debuggers;
mod error;
mod event_pump;
pub mod fleet;
mod generation;
mod generation_word;
mod image;
pub mod ledger;
pub mod link;
mod lookup_redirect;
mod mechanism;
mod options;
mod points;
mod probe;
mod report;
mod scan;
mod status;
mod suspended_frames;
mod target;
mod trampoline;
mod uprobes;
mod walk;

pub use apply::{Prediction, apply, check, revert};
pub use debuggers::{DebuggerFiles, debugger_files};
pub use error::{Busy, Error, ServiceState};
pub use generation::Generation;
pub use options::{Options, Outcome, PatchSelection, Quiescence, ThreadView};
pub use points::{Name, PendingRequest, QuiescencePoints, RegisteredThread, ThreadState, abi};
pub use report::{Observer, now_ns};
pub use status::{DataStatus, EntryStatus, PatchStatus, Status, ThreadStatus, UnfinishedTransition, peek, status};
pub use stillpoint_patch_tracee::IdlePriority;
