//! An emulated machine whose kernel can be changed under its programs: for tests and the demonstration.
//!
//! **The caller must** be root, and let the thread that boots a [`Machine`] live as long as the machine.
//!
//! **Guaranteed:** the machine's disk is as `setup/guest` made it at each boot of QEMU, and keeps what was written
//! through resets, panics and changes of kernels until the [`Machine`] is dropped. Its network is in a namespace of its
//! own: clients made by [`Machine::connect`] use it as from another machine, and no other process of this machine sees
//! it. The machine ends with its value, also when the test panics or is killed; a panic prints the last lines of its
//! console.
//!
//! **It does not** use hardware virtualisation: everything runs slowly, and tests wait for conditions.
//!
//! ```no_run
//! use stillpoint_testing::machine::{Guest, Machine};
//! let guest = Guest::build().unwrap();
//! let mut machine = Machine::boot(&guest, &guest.kernels[0], "target/debug/stillpoint".as_ref());
//! println!("{}", machine.succeed("uname -r"));
//! ```

pub mod clients;
mod guest;
mod network;
mod qemu;
mod shell;

pub use guest::{Guest, emulated};
pub use network::PortAccess;
pub use qemu::{Clock, Machine, Shape};
pub use shell::Output;
