//! The new kernel's side, or the old one's when it is started again: every unit is restored and stopped, then all are
//! released.

use crate::crash_kernel::panic_reason;
use crate::handover::{Handover, MountedHandover};
use crate::health::wait_until_healthy;
use crate::journal::{Decision, Journal, State};
use crate::kernel::{Kernel, start_loaded_kernel};
use crate::port_guard;
use crate::rendezvous::{
    DAMAGED_MESSAGE, FAILED_MESSAGE, FILLED_MESSAGE, LOST_MESSAGE, RUNNING_MESSAGE, Rendezvous, RendezvousClient,
    STOPPED_MESSAGE,
};
use crate::requested_faults;
use crate::system::{remount_read_only, reset};
use crate::unit;
use crate::watchdog::Keepalive;
use std::path::{Path, PathBuf};
use std::time::Duration;
use stillpoint_events::EventKind;
use stillpoint_host::kernel_files;
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::process_tree::complete_unit_name;
use stillpoint_kernel_checkpoint::{
    Criu, Error, Fill, Guard, MACHINE_KEY, RestoreOptions, State as FillState, create_directories, host, now_ns,
    prompt_both_ends, restore_with_hook,
};
use stillpoint_operation::{Failed, Faults, Operation, Phase, run_blocking};

/// Commands of systemctl: the first for units whose restore has not begun here, the second for others.
const SYSTEMCTL_START: &str = "start";
const SYSTEMCTL_RESTART: &str = "restart";
/// Time that a restore may take beside its limits.
const WATCHDOG_LEEWAY: Duration = Duration::from_secs(60);

/// Time between two tests for memory that is not resident.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
const LOST_MEMORY_TEXT: &str = "its memory could not be fetched, so the unit was started from its files";

/// Coordinates all that this boot has to do about a switch. Returns when nothing is left to do.
///
/// # Errors
/// The journal cannot be read or written, or units could neither be restored nor started from their files.
pub fn resume(state: &Path) -> Result<Decision, Error> {
    let Some(mut journal) = Journal::read(state)? else { return Ok(Decision::Nothing) };
    let decision = journal.decide(&host::kernel(), &host::boot());
    let _lock = if decision == Decision::Nothing { None } else { lock_state(state) };
    if let Some(why) = panic_reason().filter(|_| decision != Decision::Nothing && host::kernel() == journal.from) {
        journal.add_reason(&why);
    }
    if decision != Decision::Restore {
        // no unit waits for it
        notify_ready()?;
    }
    match decision {
        Decision::Nothing => {}
        Decision::Return => return_to_old_kernel(&mut journal, "the restore on the new kernel did not finish", None),
        Decision::Cold(why) => {
            let mut watch = take_over_watchdog(&journal).unwrap_or_else(log_watchdog_error);
            disarm_watchdog(&mut watch).unwrap_or_else(log_watchdog_error);
            start_from_files(&mut journal, why, SYSTEMCTL_START)?;
        }
        Decision::Restore => {
            let mut leader = Leader::new(journal);
            if let Err(Failed { error, .. }) = run_blocking(&mut leader, &phases()) {
                tracing::error!("{error}");
                // restores that wait for their release end
                drop(leader.rendezvous.take());
                choose_fallback(&mut leader.journal, &error, &mut leader.watch, leader.mounted)?;
                notify_ready()?;
            }
        }
    }
    Ok(decision)
}

/// Continues for a leader that has ended: systemd runs this after each end of one, normal or not.
///
/// # Errors
/// The journal cannot be read or written, or units could neither be restored nor started from their files.
pub fn continue_resume(state: &Path) -> Result<(), Error> {
    let ended_well = std::env::var_os("SERVICE_RESULT").is_some_and(|result| result == "success");
    let Some(mut journal) = Journal::read(state)?.filter(|_| !ended_well) else { return Ok(()) };
    let _lock = lock_state(state);
    let killed = Error::Step { what: "restore the units", why: "their leader was killed".into() };
    match journal.state {
        State::Prepared | State::Done | State::Aborted => Ok(()),
        State::Sealed | State::Released => {
            let mut watch = take_over_watchdog(&journal).unwrap_or_else(log_watchdog_error);
            let keepalive = || watch.as_ref().map_or((), Keepalive::report_progress);
            let serves = match journal.state {
                // the restores ended with their leader, and no process of the units has run
                State::Sealed => Err(killed),
                _ => wait_until_healthy(&journal, &keepalive),
            };
            match serves.and_then(|()| confirm_switch(&mut journal, &mut watch)) {
                Ok(()) => remove_images(&mut journal, wait_until_filled),
                // the memory that was handed over cannot be passed on: the leader held it
                Err(error) => choose_fallback(&mut journal, &error, &mut watch, None),
            }
        }
        State::Confirmed => {
            admit_clients(&mut journal, false)?;
            remove_images(&mut journal, wait_until_filled)
        }
        State::Cold => start_from_files(&mut journal, &killed.to_string(), SYSTEMCTL_START),
    }
}

/// Prevents the next switch until this one has ended. Units are restored without this lock, too.
fn lock_state(state: &Path) -> Option<stillpoint_operation::JournalLock> {
    let lock = Journal::lock(state, Duration::ZERO).unwrap_or_else(|error| {
        tracing::warn!("{}", error.with_causes());
        None
    });
    if lock.is_none() {
        tracing::warn!("another process holds the lock of switches");
    }
    lock
}

/// Notifies systemd that the units that wait for this program may start; does nothing if an operator started it.
fn notify_ready() -> Result<(), Error> {
    if std::env::var_os("NOTIFY_SOCKET").is_none() { Ok(()) } else { unit::notify("READY=1") }
}

/// Takes over the watchdog that was armed before the kexec. While this program works the watchdog does not reset the
/// machine, unless no progress test ran for longer than all limits together.
fn take_over_watchdog(journal: &Journal) -> Result<Option<Keepalive>, Error> {
    let limit = journal.config.restore_limit_s.saturating_add(journal.config.health_limit_s);
    let limit = Duration::from_secs(limit) + WATCHDOG_LEEWAY;
    journal.watchdog.as_ref().map(|watchdog| watchdog.take_over(limit)).transpose()
}

fn disarm_watchdog(watch: &mut Option<Keepalive>) -> Result<(), Error> {
    watch.take().map_or(Ok(()), Keepalive::disarm)
}

/// Logs an error of the watchdog: on the old kernel units must be restored in any case.
fn log_watchdog_error<T: Default>(error: Error) -> T {
    tracing::error!("the watchdog may reset the machine: {error}");
    T::default()
}

/// Chooses the way back after a failure. A watchdog runs on during a kexec back.
fn choose_fallback(
    journal: &mut Journal,
    error: &Error,
    watch: &mut Option<Keepalive>,
    mounted: Option<MountedHandover>,
) -> Result<(), Error> {
    let why = error.to_string();
    // this process cannot pass it on to the old kernel
    let gone = journal.handover.is_some() && mounted.is_none();
    match journal.state {
        // no process has run: the images are valid
        State::Sealed if !gone && host::kernel() == journal.to => return_to_old_kernel(journal, &why, mounted),
        // they have run here and do not serve: the old kernel starts them from their files
        State::Released if host::kernel() == journal.to => return_to_old_kernel(journal, &why, mounted),
        // none has run here either; the failure may be temporary, unless it is the image
        State::Sealed if !gone && journal.has_attempt_left() && !matches!(error, Error::Damaged { .. }) => {
            return_to_old_kernel(journal, &why, mounted)
        }
        // their restores may still be active here
        State::Sealed | State::Released => {
            disarm_watchdog(watch).unwrap_or_else(log_watchdog_error);
            start_from_files(journal, &why, SYSTEMCTL_RESTART)
        }
        _ => Ok(()),
    }
}

/// Goes to the old kernel, with the memory that this one was handed.
fn return_to_old_kernel(journal: &mut Journal, why: &str, mut mounted: Option<MountedHandover>) -> ! {
    journal.add_reason(why);
    if let (State::Sealed, Some(Err(error))) = (journal.state, mounted.as_mut().map(MountedHandover::preserve)) {
        tracing::error!("the images cannot be handed over to the old kernel: {error}");
    }
    // nothing may stop the way back, not even a full disk: the old kernel decides correctly without this line
    if let Err(error) = journal.write() {
        tracing::error!("the journal could not be written: {error}");
    }
    let loaded = Kernel::find(&journal.config.boot, &journal.from)
        .map_err(Error::refused)
        .and_then(|kernel| kernel.load("", None, None));
    if let Err(error) = loaded {
        tracing::error!("the old kernel cannot be loaded, so the machine is reset: {error}");
        reset();
    }
    let error = remount_read_only().map_or_else(|error| error, |_| start_loaded_kernel());
    tracing::error!("{error}; the machine is reset");
    reset()
}

/// Starts the units from their files, as after a start of the machine. Their clients wait until they serve, and then
/// learn at once that their connections are gone.
fn start_from_files(journal: &mut Journal, why: &str, how: &str) -> Result<(), Error> {
    journal.add_reason(why);
    let expected = journal.state != State::Cold;
    if let Err(error) = journal.advance(State::Cold) {
        // without the images a full disk has room
        tracing::warn!("{error}; retry without the images");
        let _ = journal.drop_images();
        journal.advance(State::Cold)?;
    }
    // the generator has no more to write
    run("reload the configuration of systemd", "systemctl", &["daemon-reload"], None)?;
    let names: Vec<&str> = journal.units.iter().map(|unit| unit.name.as_str()).collect();
    if how == SYSTEMCTL_RESTART {
        // Half-restored processes handle no signal, and Debian's MariaDB has fifteen minutes to end. There may be none.
        let _ = run(
            "terminate partly restored processes",
            "systemctl",
            &[&["kill", "--signal=KILL"], &names[..]].concat(),
            None,
        );
    }
    let started = run("start the units", "systemctl", &[&[how], &names[..]].concat(), None);
    // even if that failed
    port_guard::lift_and_record(journal, expected)?;
    prompt_connections(journal);
    release_crash_kernel(journal);
    // the result is recorded if there is room
    let _ = journal.write();
    let _ = journal.drop_images();
    started.map(|_| ())
}

/// Informs both ends of every connection in the images that packets pass again.
fn prompt_connections(journal: &mut Journal) {
    let images: Vec<PathBuf> = journal.units.iter().map(|unit| journal.image(&unit.name)).collect();
    let prompted = prompt_both_ends(images.iter().map(PathBuf::as_path)).map_err(|error| error.with_causes());
    match &prompted {
        Ok(prompted) => tracing::info!(prompted, "both ends of the connections in the images were informed"),
        Err(why) => tracing::warn!("connections wait until their next retry: {why}"),
    }
    journal.prompted = Some(prompted);
}

/// The order of a restore. No phase has an inverse: after an error, or the death of the leader, the state in the journal
/// decides about the way back.
fn phases() -> [Phase<Leader>; 6] {
    [
        Phase::without_inverse("boot", begin),
        Phase::without_inverse("restore", wait_until_stopped),
        Phase::point_of_no_return("release", release),
        Phase::without_inverse("confirm", confirm),
        Phase::without_inverse("lift", |leader| confirm_switch(&mut leader.journal, &mut leader.watch)),
        Phase::without_inverse("fill", fill),
    ]
}

/// The restore of all units, and what it holds.
struct Leader {
    journal: Journal,
    faults: Faults,
    watch: Option<Keepalive>,
    /// The memory that was handed over, as long as this is held.
    mounted: Option<MountedHandover>,
    /// The restores of the units; they begin when the images can be read.
    rendezvous: Option<Rendezvous>,
    /// Beginning of the time that is recorded next.
    begun_ns: u64,
}

impl Operation for Leader {
    type Error = Error;
    const NAME: &'static str = "resume";

    fn faults(&self) -> &Faults {
        &self.faults
    }

    /// No process receives events while a kernel starts; the journal has the timings.
    fn report(&mut self, _event: EventKind) {}
}

impl Leader {
    fn new(journal: Journal) -> Self {
        let faults = requested_faults::leader_faults(&journal);
        Leader { journal, faults, watch: None, mounted: None, rendezvous: None, begun_ns: now_ns() }
    }

    /// Calls `wait` with the restores of the units and a function to be called meanwhile, and records the duration.
    fn wait(
        &mut self,
        phase: &str,
        wait: impl FnOnce(&mut Rendezvous, &Journal, &dyn Fn()) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let keepalive = || self.watch.as_ref().map_or((), Keepalive::report_progress);
        let unheard = || Error::Step { what: "restore", why: "the leader does not listen".into() };
        wait(self.rendezvous.as_mut().ok_or_else(unheard)?, &self.journal, &keepalive)?;
        let now = now_ns();
        self.journal.record_timing(phase, (now - self.begun_ns) / 1000);
        self.begun_ns = now;
        Ok(())
    }
}

/// Records the attempt, and makes the images available to the restores of the units.
fn begin(leader: &mut Leader) -> Result<(), Error> {
    let (kernel, journal) = (host::kernel(), &mut leader.journal);
    if kernel == journal.from {
        // no other program can record it
        journal.why.get_or_insert_with(|| {
            "the machine started with the old kernel: the new one panicked or hung, or power was lost".into()
        });
    }
    if kernel == journal.to {
        check_crash_kernel(journal);
    }
    journal.begun_on.push(kernel.clone());
    let up_us = kernel_files::text("/proc/uptime").ok().and_then(|text| seconds_to_us(&text));
    journal.record_timing("boot", up_us.unwrap_or(0));
    journal.write()?;
    // A watchdog that cannot be stopped would end the released processes: then the new kernel releases none.
    leader.watch = match take_over_watchdog(journal) {
        Err(error) if kernel == journal.from => log_watchdog_error(error),
        watch => watch?,
    };
    leader.mounted = mount_images(journal)?;
    leader.rendezvous = Some(Rendezvous::begin()?);
    // systemd has much to start before the units: meanwhile criu detects the features of this kernel, and keeps them
    // for all
    let criu = Criu::new(&journal.config.criu);
    std::thread::spawn(move || criu.features());
    Ok(())
}

fn wait_until_stopped(leader: &mut Leader) -> Result<(), Error> {
    leader.wait("restore", Rendezvous::wait_until_stopped)
}

/// Lets the processes run.
fn release(leader: &mut Leader) -> Result<(), Error> {
    // on disk before the first instruction
    leader.journal.advance(State::Released)?;
    leader.wait("release", Rendezvous::release)
}

fn confirm(leader: &mut Leader) -> Result<(), Error> {
    notify_ready()?;
    leader.wait("confirm", |_, journal, keepalive| wait_until_healthy(journal, keepalive))
}

fn fill(leader: &mut Leader) -> Result<(), Error> {
    let Leader { journal, rendezvous, .. } = leader;
    remove_images(journal, |journal| {
        rendezvous.as_mut().map_or_else(|| wait_until_filled(journal), |units| units.filled(journal))
    })
}

/// Ends the switch when the units serve: there is no way back from here, and clients may connect.
fn confirm_switch(journal: &mut Journal, watch: &mut Option<Keepalive>) -> Result<(), Error> {
    let begun = now_ns();
    disarm_watchdog(watch)?;
    journal.advance(State::Confirmed)?;
    admit_clients(journal, true)?;
    journal.record_timing("lift", (now_ns() - begun) / 1000);
    Ok(())
}

/// Lets clients connect.
fn admit_clients(journal: &mut Journal, expected: bool) -> Result<(), Error> {
    port_guard::lift_and_record(journal, expected)?;
    prompt_connections(journal);
    Ok(())
}

/// Records whether a panic of this kernel returns to the old one without the firmware.
fn check_crash_kernel(journal: &mut Journal) {
    let Some(crash) = &mut journal.crash else { return };
    crash.record_loaded();
    if let Some(Err(why)) = &crash.loaded {
        tracing::warn!("after a panic the boot loader starts {}: no crash kernel is loaded: {why}", journal.from);
    }
}

/// Releases the crash kernel when clients are served: from here on the new kernel panics like any other.
fn release_crash_kernel(journal: &mut Journal) {
    let is_there = host::kernel() == journal.to && !journal.config.crash_kernel_stays;
    if let Some(crash) = journal.crash.as_mut().filter(|_| is_there) {
        crash.release();
    }
}

/// Mounts the images at the same place as before. Memory that has lost them is not a reason to retry on the kernel that
/// knows it.
fn mount_images(journal: &Journal) -> Result<Option<MountedHandover>, Error> {
    let lost = |why: String| {
        let why = format!("the memory has lost the images, as after a loss of power: {why}");
        Error::Damaged { path: journal.config.images(), why }
    };
    let mounted = match (&journal.region, &journal.handover) {
        (Some(region), _) => region.mount().map(|()| None),
        (None, Some(handover)) => Handover::take_over(handover).map(Some),
        (None, None) => return Ok(None),
    };
    let mounted = mounted.map_err(|error| lost(error.with_causes()))?;
    if journal.units.iter().all(|unit| journal.image(&unit.name).is_dir()) {
        return Ok(mounted);
    }
    Err(lost("its file system contains no images".into()))
}

fn seconds_to_us(uptime: &str) -> Option<u64> {
    let seconds: f64 = uptime.split(' ').next()?.parse().ok()?;
    Some((seconds * 1e6) as u64)
}

/// Removes the images when all memory is resident. `filled` waits for that, and returns the units that have lost
/// theirs.
fn remove_images(
    journal: &mut Journal,
    filled: impl FnOnce(&Journal) -> Result<Vec<String>, Error>,
) -> Result<(), Error> {
    let begun = now_ns();
    release_crash_kernel(journal);
    // the generator writes no more units: one that is restarted while its memory is not all resident starts from its
    // files
    if let Err(error) = run("reload the configuration of systemd", "systemctl", &["daemon-reload"], None) {
        tracing::warn!("systemd keeps the drop-ins of the switch until systemctl daemon-reload: {error}");
    }
    let lost = filled(journal)?;
    wait_until_unused(journal);
    journal.record_timing("fill", (now_ns() - begun) / 1000);
    journal.drop_images()?;
    lost.iter().for_each(|why| journal.add_reason(why));
    // the next switch may begin
    journal.advance(if lost.is_empty() { State::Done } else { State::Cold })?;
    for lost in lost {
        let unit = lost.split(':').next().unwrap_or_default();
        run("start a unit that lost its memory", "systemctl", &[SYSTEMCTL_RESTART, unit], None)?;
    }
    Ok(())
}

/// Waits until all memory is resident, without messages of the restores. Returns a line for each unit that has lost its
/// memory, from the progress files when no daemon serves any more.
fn wait_until_filled(journal: &Journal) -> Result<Vec<String>, Error> {
    wait_until_unused(journal);
    let fills = journal.units.iter().map(|unit| (unit, Fill::read(&journal.image(&unit.name)).map(|fill| fill.state)));
    let lost = fills.filter(|(_, state)| *state == Some(FillState::Failed));
    Ok(lost.map(|(unit, _)| format!("{}: {LOST_MEMORY_TEXT}", unit.name)).collect())
}

/// Waits until no daemon serves any image: the daemon of a stopped unit ends with the last of its processes.
fn wait_until_unused(journal: &Journal) {
    while journal.filling().next().is_some() {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Restores one unit in its own control group; systemd has started this process in its place.
///
/// # Errors
/// The unit is not part of the switch, its image has been used, or the restore fails.
pub fn restore_unit(state: &Path, name: &str) -> Result<i32, Error> {
    let journal = Journal::read(state)?.ok_or_else(|| Error::Unsealed(state.to_owned()))?;
    let name = complete_unit_name(name)?.to_string();
    let Some(unit) = journal.units.iter().find(|unit| unit.name == name) else {
        return Err(Error::refused(format_args!("{name} is not part of the switch")));
    };
    check_unused(&journal)?;
    // Units of the switch that are ordered after this one are restored beside it, not after it: they ran together, and
    // none of them does anything before all are released.
    unit::notify("READY=1")?;
    // once the leader is there, the images are
    let client = RendezvousClient::connect(&name, journal.config.restore_limit_s)?;
    requested_faults::damage_image(&journal, &name)?;
    let options = RestoreOptions {
        image: journal.image(&name),
        criu: Criu::new(&journal.config.criu),
        restore: journal.config.memory,
        verify: !journal.config.verify_on_demand,
        guard: Guard::None,
        allow_stale: true,
        key: MACHINE_KEY.into(),
        trust_image: false,
        fill_rate: journal.config.fill_rate,
        address_limit: Duration::from_secs(journal.config.address_limit_s),
        unit: Some(name.clone()),
        faults: Faults::none(),
    };
    let stopped = || client.report(STOPPED_MESSAGE).and_then(|()| client.wait());
    let restored = create_directories(&unit.directories)
        .and_then(|()| restore_with_hook(&options, &stopped, &|event| tracing::info!("{:?}", event.kind)));
    let restored = restored.inspect_err(|error| {
        let lasts = matches!(error, Error::Damaged { .. } | Error::Page { .. } | Error::Unsealed(_));
        // the leader may have ended
        let _ = client.report_reason(if lasts { DAMAGED_MESSAGE } else { FAILED_MESSAGE }, error);
    })?;
    unit::notify(&format!("MAINPID={}\n", restored.pid))?;
    // It makes no difference to the unit if no process reads this: the unit runs.
    let _ = client.report(RUNNING_MESSAGE);
    restored.wait_for_daemon(&name)?;
    if Fill::read(&options.image).is_some_and(|fill| fill.state == FillState::Failed) {
        let _ = client.report_reason(LOST_MESSAGE, &LOST_MEMORY_TEXT);
    } else {
        let _ = client.report(FILLED_MESSAGE);
    }
    Ok(restored.pid)
}

/// Refuses to restore a unit that is started again after the release: it must not return to its state before the
/// switch.
fn check_unused(journal: &Journal) -> Result<(), Error> {
    if journal.state == State::Sealed {
        return Ok(());
    }
    Err(Error::refused(
        "its image has been used: after clients are admitted, or after systemctl daemon-reload, the unit starts from \
         its files",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_not_restored_again_when_its_processes_have_run() {
        let journal = |state| Journal { state, ..Journal::plain("6.1", "6.12") };
        assert!(check_unused(&journal(State::Sealed)).is_ok());
        for state in [State::Released, State::Confirmed, State::Done, State::Cold] {
            assert!(check_unused(&journal(state)).unwrap_err().to_string().contains("has been used"));
        }
    }

    #[test]
    fn an_uptime_is_read() {
        assert_eq!(seconds_to_us("12.34 20.00\n"), Some(12_340_000));
        assert_eq!(seconds_to_us(""), None);
    }
}
