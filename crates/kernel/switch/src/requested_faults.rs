//! Faults that a test requests on the command line of the new kernel: `stillpoint.fault=WORD`.

use crate::journal::Journal;
use crate::system::reset_machine;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::os::unix::fs::FileExt;
use stillpoint_host::kernel_files;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::{Error, ErrorContext, host};
use stillpoint_operation::{FaultPoint, Faults};

/// Word for a restore that fails on the new kernel, and once on the old one.
const RESTORE_TWICE: &str = "restore-twice";

/// Returns the word on the command line of this kernel, if it is the new one.
fn requested_word(journal: &Journal) -> Option<String> {
    let line = kernel_files::text("/proc/cmdline").unwrap_or_default();
    let word = line.split_whitespace().find_map(|part| part.strip_prefix("stillpoint.fault="));
    word.filter(|_| host::kernel() == journal.to).map(ToOwned::to_owned)
}

/// Returns the faults of the restore that begins.
pub(crate) fn leader_faults(journal: &Journal) -> Faults {
    let is_second = journal.config.append.contains(RESTORE_TWICE) && journal.begun_on.len() == 1;
    faults_of(if is_second { Some(RESTORE_TWICE.into()) } else { requested_word(journal) }.as_deref())
}

fn faults_of(word: Option<&str>) -> Faults {
    let none = Faults::none();
    match word {
        Some("restore" | RESTORE_TWICE) => none.failing(FaultPoint::after("restore")),
        // on the first processor, and on the second one
        Some("panic") => none.calling(FaultPoint::before("restore"), || panic_on(0)),
        Some("panic-aside") => none.calling(FaultPoint::before("restore"), || panic_on(1)),
        // all units are restored and stopped
        Some("leader") => none.killing(FaultPoint::after("restore")),
        Some("late-leader") => none.killing(FaultPoint::after("release")),
        // the machine loses its power
        Some("reset") => none.calling(FaultPoint::after("release"), reset_machine),
        // a unit does not become healthy
        Some("health") => none.failing(FaultPoint::after("confirm")),
        _ => none,
    }
}

/// Panics the kernel on this processor, if it exists.
fn panic_on(processor: usize) {
    let mut only = CpuSet::new();
    only.set(processor);
    if let Err(error) = sched_setaffinity(None, &only) {
        tracing::warn!("there is no processor {processor}: {error}");
    }
    let _ = kernel_files::write("/proc/sysrq-trigger", "c");
}

/// Inverts the first byte of the first memory in a unit's image, if a test requests that.
pub(crate) fn damage_image(journal: &Journal, unit: &str) -> Result<(), Error> {
    if requested_word(journal).as_deref() != Some("damage") {
        return Ok(());
    }
    let image = &journal.image(unit);
    let directory = Directory::open(image)?;
    let Some(name) = directory.names()?.into_iter().find(|name| name.starts_with("foam-task")) else {
        return Err(Error::Unsealed(image.to_owned()));
    };
    let (path, file) = (image.join(&name), directory.file_to_change(&name)?);
    let place = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).at("seek in", &path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, place).at("read", &path)?;
    file.write_all_at(&[!byte[0]], place).and_then(|()| file.sync_all()).at("write", &path)
}
