//! Checkpoints running programs into FOAM images, and restores them: their memory on demand.
//!
//! **The caller must** be root; provide a criu of 4.1 or newer; ensure that no process changes the files that the
//! processes have open between checkpoint and restore (an image without its files is worth nothing, and files without
//! their image are older than they seem); run the lazy-pages daemon ([`serve`]) in a process of its own with one
//! thread.
//!
//! **Guaranteed:** [`check`] touches nothing. A [`checkpoint`] that fails lets the processes run on as they were: they
//! end only when the image has been sealed on disk. An image is made, and used, only where no other user can change it.
//! A [`restore`] refuses an image that is not as it was sealed, that this machine did not seal, that was made on a
//! newer kernel, or that is running already. While memory is not all resident, no page is ever wrong: a daemon that is
//! killed is replaced, threads wait for it, and if pages cannot be fetched any more the processes are killed before
//! they could read zeros. Pages that a process gives up stay given up.
//!
//! **It does not** take processes of other namespaces, nor undo what a process wrote to files.
//!
//! ```text
//!  checkpoint:  check -> dump (frozen) -> seal -> end          anything fails: thaw, discard
//!  restore:     check -> verify -> prepare -> daemon -> restore (stopped) -> run -> wake -> background fill
//! ```
//!
//! ```no_run
//! use stillpoint_kernel_checkpoint::{CheckpointOptions, Criu, Guard, MACHINE_KEY, checkpoint};
//! use stillpoint_operation::Faults;
//! # fn main() -> Result<(), stillpoint_kernel_checkpoint::Error> {
//! let options = CheckpointOptions {
//!     pid: 4121,
//!     image: "/run/stillpoint/redis".into(),
//!     criu: Criu::new("criu"),
//!     leave_running: false,
//!     form: None,
//!     guard: Guard::Nftables,
//!     passes: 4,
//!     key: MACHINE_KEY.into(),
//!     faults: Faults::none(),
//! };
//! println!("{} pages", checkpoint(&options, &|event| println!("{:?}", event.kind))?.pages);
//! # Ok(())
//! # }
//! ```
//!
//! Follows "Instant OS Updates via Userspace Checkpoint-and-Restart" (ATC 2016), sections 3 and 5.1, with an unmodified
//! criu and userfaultfd in the place of a mapped image: a mapping restores pages that were given up.
#![forbid(unsafe_code)]

mod addresses;
mod cgroup;
mod check;
mod checkpoint;
pub mod command;
mod criu;
mod criu_files;
mod error;
mod guard;
pub mod host;
mod image;
mod ipc;
mod journal;
mod lazy;
mod machine_key;
mod netlink;
mod orphans;
mod packet;
mod page_server;
mod precopy;
pub mod process_tree;
mod progress;
mod repair_mode;
mod restore;
mod retransmission;
mod socket_diagnosis;
mod space;
mod stale_mark;
mod status;
mod store;
mod unit_restart;
mod unix_peers;
mod volatile;

pub use addresses::ADDRESS_TIMEOUT;
pub use check::{Finding, Report, Severity, check};
pub use checkpoint::{Checkpoint, CheckpointOptions, Guard, Moment, checkpoint, checkpoint_with_hook};
pub use criu::{Criu, DUMP_LOG, RESTORE_LOG};
pub use criu_files::RestoreMode;
pub use error::{Error, ErrorContext};
pub use guard::{DropScope, GUARD_READY_LINE, Gap, LiftedGuard, PortGuard, guard_connections, guards};
pub use image::Image;
pub use ipc::has_unmovable_memory;
pub use journal::JournalEntry;
pub use lazy::{FetchCounts, Fill, LazyOptions, State, serve};
pub use machine_key::{MACHINE_KEY, MachineKey};
pub use precopy::Pass;
pub use progress::{Observer, now_ns};
pub use restore::{DAEMON_READY_LINE, RestoreOptions, RestoreOutcome, check_restore, restore, restore_with_hook};
pub use retransmission::prompt_both_ends;
pub use space::{check_space, memory_bytes, nearest_existing};
pub use stale_mark::StaleMark;
pub use status::{DiscardOutcome, Stage, Status, check_discard, discard, filling_images, status};
pub use stillpoint_kernel_foam::{Form, Index, LAZY, Object, PRESENT, Recorded};
pub use unit_restart::{check_unit_restart, unit_properties};
pub use volatile::{Directory, VolatileObjects, create_directories, is_memory};
