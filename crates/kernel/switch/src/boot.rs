//! First step of a switch on a kernel that starts: systemd runs this before it looks at any unit.

use crate::journal::{Decision, Journal, State};
use crate::port_guard::{SOCKET_PATH, raise_unowned};
use crate::system::skip_pids;
use crate::unit::{self, LEADER_UNIT};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::{Error, ErrorContext, host};

/// First process id of units on an idle machine: the first processes of another kernel have lower ids.
const FIRST_PID: u32 = 1000;
/// The unit that owns the guard.
const GUARD_UNIT: &str = "stillpoint-guard.service";

/// Prepares this boot; without an active switch only the process ids. `units` is the directory for generated units.
///
/// # Errors
/// The journal cannot be read, a unit cannot be written, or the guard cannot be raised.
pub fn boot(state: &Path, units: &Path) -> Result<Decision, Error> {
    let program = std::env::current_exe().with_action("find this program")?;
    boot_with(state, units, &program, raise_unowned, skip_pids)
}

/// Prepares this boot, with the functions that change the machine as arguments.
fn boot_with(
    state: &Path,
    units: &Path,
    program: &Path,
    guard: impl Fn(&[u16]) -> Result<(), Error>,
    skip: impl Fn(u32) -> Result<(), Error>,
) -> Result<Decision, Error> {
    let journal = Journal::read(state)?;
    let decision = journal.as_ref().map_or(Decision::Nothing, |journal| journal.decide(&host::kernel(), &host::boot()));
    let guarded = match &journal {
        Some(journal) if decision != Decision::Nothing => {
            prepare(journal, decision, (program, state), units)?;
            // After the units: without a guard connections are reset, but without the units' drop-ins a unit would
            // start from its files, beside its image. Before a cold start the guard makes clients wait until the units
            // serve, instead of a refusal.
            guard(&journal.ports())
        }
        // systemd does not know the successor of a leader that still waits for memory, unless it is written again
        Some(journal) if journal.state == State::Confirmed => {
            write_leader_unit(&[], (program, state), units).map(|_| ())
        }
        _ => Ok(()),
    };
    let above = journal.filter(|_| matches!(decision, Decision::Restore | Decision::Return));
    // Last, and even after an error: a restore that finds an id in use falls back, but a restore that was not begun
    // does not.
    if let Err(error) = skip(above.map_or(0, |journal| journal.pid_max) + FIRST_PID) {
        tracing::error!("processes that start now may take the ids of those in the images: {}", error.with_causes());
    }
    guarded.map(|()| decision)
}

/// Writes the units of this boot for systemd.
fn prepare(journal: &Journal, decision: Decision, (program, state): (&Path, &Path), units: &Path) -> Result<(), Error> {
    let names: Vec<String> = journal.units.iter().map(|unit| unit.name.clone()).collect();
    if matches!(decision, Decision::Restore | Decision::Return) {
        for name in &names {
            write_drop_in(units, name, &unit::image_dropin(program, state, name))?;
        }
    }
    if decision == Decision::Restore {
        for name in &journal.delayed {
            write_drop_in(units, name, &format!("[Unit]\nAfter={LEADER_UNIT}\n"))?;
        }
    }
    write_guard_unit((program, state), units)?;
    // on the way back to the old kernel nothing is started here
    let wanted: &[String] = if decision == Decision::Return { &[] } else { &names };
    let path = write_leader_unit(wanted, (program, state), units)?;
    want_at_boot(&path, units)
}

/// Makes systemd start a unit before all ordinary ones.
fn want_at_boot(path: &Path, units: &Path) -> Result<(), Error> {
    let wants = Directory::make_public(&units.join("sysinit.target.wants"))?;
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let link = wants.path().join(name);
    let _ = wants.remove(name);
    symlink(path, &link).at("link", link)
}

/// Writes the unit that owns the guard, and orders all other services after it: any of them may flush nftables.
fn write_guard_unit((program, state): (&Path, &Path), units: &Path) -> Result<(), Error> {
    let text = unit::guard_unit(program, state, SOCKET_PATH);
    let path = Directory::make_public(units)?.write_readable(GUARD_UNIT, text.as_bytes())?;
    let after = format!("[Unit]\nAfter={GUARD_UNIT}\n");
    // a drop-in of one unit hides the drop-in of the same name for all services
    for (dir, text) in [("service.d".to_owned(), after.as_str()), (format!("{GUARD_UNIT}.d"), "")] {
        let directory = Directory::make_public(&units.join(dir))?;
        directory.write_readable("zz-stillpoint-guard.conf", text.as_bytes())?;
    }
    want_at_boot(&path, units)
}

/// Writes a drop-in that sorts after all others of a unit.
fn write_drop_in(units: &Path, name: &str, text: &str) -> Result<(), Error> {
    let directory = Directory::make_public(&units.join(format!("{name}.d")))?;
    directory.write_readable("zz-stillpoint.conf", text.as_bytes())?;
    Ok(())
}

/// Writes the unit that leads the restore; returns its path.
fn write_leader_unit(wanted: &[String], (program, state): (&Path, &Path), units: &Path) -> Result<PathBuf, Error> {
    let text = unit::leader_unit(program, state, wanted);
    Ok(Directory::make_public(units)?.write_readable(LEADER_UNIT, text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Unit;
    use std::cell::RefCell;
    use std::fs;

    #[test]
    fn units_and_guard_are_written_although_process_ids_fail() {
        let dir = tempfile::tempdir().unwrap();
        let (state, units) = (dir.path().join("state"), dir.path().join("units"));
        fs::create_dir(&units).unwrap();
        let mut journal = Journal::plain(&host::kernel(), "6.99");
        journal.config.state.clone_from(&state);
        journal.pid_max = 70_000;
        journal.units.push(Unit { ports: vec![6379], ..Unit::plain("redis-server.service") });
        journal.advance(State::Sealed).unwrap();
        let (guarded, skipped) = (RefCell::new(Vec::new()), RefCell::new(0));
        let guard = |ports: &[u16]| {
            guarded.borrow_mut().extend_from_slice(ports);
            Ok(())
        };
        let skip = |above| {
            *skipped.borrow_mut() = above;
            Err(Error::NoProcess(1))
        };
        let decision = boot_with(&state, &units, Path::new("/bin/stillpoint"), guard, skip).unwrap();
        assert_eq!(decision, Decision::Restore);
        assert!(units.join("redis-server.service.d/zz-stillpoint.conf").exists());
        assert!(units.join("sysinit.target.wants").join(LEADER_UNIT).exists());
        assert!(units.join("sysinit.target.wants").join(GUARD_UNIT).exists());
        let all = fs::read_to_string(units.join("service.d/zz-stillpoint-guard.conf")).unwrap();
        assert_eq!(all, "[Unit]\nAfter=stillpoint-guard.service\n");
        assert_eq!((guarded.into_inner(), skipped.into_inner()), (vec![6379], 71_000));
    }

    #[test]
    fn units_are_as_they_were_while_their_memory_comes_and_their_leader_has_a_successor() {
        let dir = tempfile::tempdir().unwrap();
        let (state, units) = (dir.path().join("state"), dir.path().join("units"));
        fs::create_dir(&units).unwrap();
        let mut journal = Journal::plain("6.1", &host::kernel());
        journal.config.state.clone_from(&state);
        journal.units.push(Unit::plain("redis-server.service"));
        let names = |journal: &mut Journal, now| {
            journal.advance(now).unwrap();
            let _ = fs::remove_file(units.join(LEADER_UNIT));
            boot_with(&state, &units, Path::new("/bin/stillpoint"), |_| Ok(()), |_| Ok(())).unwrap();
            fs::read_dir(&units).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
        };
        assert_eq!(names(&mut journal, State::Confirmed), [LEADER_UNIT]);
        assert!(fs::read_to_string(units.join(LEADER_UNIT)).unwrap().contains("ExecStopPost="));
        assert!(names(&mut journal, State::Done).is_empty());
    }
}
