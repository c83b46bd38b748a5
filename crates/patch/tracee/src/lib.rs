//! Processes seen through `/proc` and held through ptrace, without ever endangering them.
#![warn(missing_docs)]

mod bpf;
mod carrier;
mod error;
mod frame;
mod freeze;
mod ids;
mod maps;
mod memory;
mod module;
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
pub use freeze::Frozen;
pub use ids::{Pid, Tid};
pub use maps::Mapping;
pub use memory::Memory;
pub use module::{Libc, Module};
pub use process::Process;
pub use registers::Registers;
pub use remote::Remote;
pub use session::{Birth, Event, Session, Stop, attach};
pub use status::{Status, ThreadActivity, ThreadInfo};
pub use stopped::{Held, Stopped};
