//! Change of the kernel below running units: their processes are stopped meanwhile, and continue with their memory,
//! files and connections.
//!
//! ```text
//!  old kernel   check -> preload -> stop -> passes -> close -> drain -> guard -> freeze -> seal -> still -> watch -> jump
//!               anything fails: the inverses of what was done, last first; the units run on
//!  new kernel   guard -> restore (stopped) -> release -> confirm -> lift -> wake -> fill -> drop images
//!               before release: the old kernel is started again and restores; after it: it starts the units from their files
//!               (by kexec; after a panic by the crash kernel that the new one has loaded first, or by the boot loader)
//! ```
//!
//! **The caller must** be root, and let systemd run the programs below on both kernels.
//!
//! **Guaranteed:** [`check_switch`] touches nothing. A [`switch()`] that fails, or is killed, before the kexec leaves the
//! units running as they were. After it an image is restored only while no process of it has run; otherwise the units
//! start from their files. Clients wait, and connect when the units serve.
//!
//! Three programs take part after the kexec: systemd's generator ([`boot()`]) raises the guard before any address is
//! up, and has each unit start from its image ([`restore_unit`]); a service keeps the guard ([`guard_ports`]);
//! [`resume()`] leads them, and if it is killed [`continue_resume`] continues.
#![forbid(unsafe_code)]

mod boot;
mod boot_loader;
mod command_line;
mod config;
mod crash_kernel;
mod guardian;
mod handover;
mod health;
mod journal;
mod kernel;
mod memmap;
mod obstacles;
mod phases;
mod port_guard;
mod region;
mod remaining_units;
mod rendezvous;
mod requested_faults;
mod reservation;
mod resume;
mod stall_limit;
mod start_order;
mod system;
mod unit;
mod watchdog;

pub use boot::boot;
pub use config::{CONFIG, Config, UnitConfig};
pub use crash_kernel::CrashKernel;
pub use guardian::{find_interrupted, run_guardian};
pub use handover::Handover;
pub use journal::{Decision, Journal, State, Timing, Unit};
pub use phases::{Plan, check_switch, roll_back, switch};
pub use port_guard::guard_ports;
pub use region::Region;
pub use remaining_units::RemainingUnits;
pub use reservation::{DROPIN_PATH, Reservation, ReservationRequest, regions, remove_dropin, reserve};
pub use resume::{continue_resume, restore_unit, resume};
pub use system::reset_machine;
pub use unit::{dropin, dropin_path};
pub use watchdog::Watchdog;
