//! The old kernel's side: one list of phases, each with its inverse.

use crate::boot_loader;
use crate::command_line;
use crate::config::Config;
use crate::crash_kernel::CrashKernel;
use crate::guardian::{self, Guardian};
use crate::handover::{Handover, MountedHandover};
use crate::journal::{Decision, Journal, State, Unit};
use crate::kernel::{Kernel, start_loaded_kernel};
use crate::obstacles;
use crate::port_guard::{lower, port_guard};
use crate::region::Region;
use crate::remaining_units::RemainingUnits;
use crate::stall_limit::StallLimit;
use crate::start_order::StartOrder;
use crate::system::{Disks, find_missing, remount_read_only, remount_writable, reset, writable_now};
use crate::unit::{dropin_of, dropin_path, pending_connections, socket_units, tcp_ports};
use crate::watchdog::{self, Armed, Watchdog};
use procfs::process::Process;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind};
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::process_tree::{complete_unit_name, process_name, tree, unit_root_process};
use stillpoint_kernel_checkpoint::{
    Checkpoint, CheckpointOptions, Criu, DUMP_LOG, DropScope, Error, Guard, MACHINE_KEY, Moment, Observer, PortGuard,
    VolatileObjects, check, check_space, checkpoint_with_hook, host, memory_bytes, now_ns, unit_properties,
};
use stillpoint_operation::{Faults, JournalLock, Operation, Phase, run_blocking};

/// Time for connections that are being made to finish before the freeze.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which another switch ends after it reports its end.
const OTHER_SWITCH_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of the test that checkpoints make progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Time without progress after which a checkpoint, and the switch with it, is aborted; one that makes progress has no
/// limit.
const STALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Description of a switch.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Release of the kernel to go to.
    pub to: String,
    /// All other settings.
    pub config: Config,
    /// Maximum number of passes over memory while the units run.
    pub passes: u32,
    /// For tests: requested faults.
    pub faults: Faults,
}

/// The order of a switch; its inverses run from the phase that failed to the front.
fn phases<'p>() -> [Phase<Switch<'p>>; 11] {
    [
        Phase::new("preload", preload, |_| Kernel::unload()),
        Phase::new("stop", stop_remaining, start_remaining),
        Phase::new("passes", run_passes, abort_checkpoints),
        Phase::new("close", |s| s.raise(DropScope::Syn), |s| lower(&mut s.port_guard)),
        Phase::without_inverse("drain", drain),
        Phase::without_inverse("guard", guard),
        Phase::new("freeze", freeze, abort_checkpoints),
        Phase::new("seal", seal, unseal),
        Phase::new("still", |s| remount_read_only().map(|mounts| s.mounts = mounts), |s| remount_writable(&s.mounts)),
        Phase::new("watch", arm_watchdog, disarm_watchdog),
        // it returns only if it fails
        Phase::point_of_no_return("jump", |_| Err(start_loaded_kernel())),
    ]
}

/// Finds all obstacles to a switch at once. Nothing is touched.
///
/// # Errors
/// There is an obstacle (the error names all of them), or systemd or criu gives no answer.
pub fn check_switch(plan: &Plan) -> Result<Journal, Error> {
    let (config, from) = (&plan.config, host::kernel());
    let mut refused = find_missing(config);
    let places = [config.state.clone(), config.images()];
    refused.extend(places.iter().filter_map(|dir| Some(Directory::check(dir).err()?.to_string())));
    let mut obstacles = obstacles::find_passphrases(&[places[0].as_path(), places[1].as_path(), Path::new("/")]);
    match Kernel::find(&config.boot, &plan.to) {
        Ok(kernel) => {
            let loading = obstacles::check_loading(&kernel.image);
            obstacles.refused.extend(loading.refused);
            obstacles.cautions.extend(loading.cautions);
        }
        Err(why) => refused.push(why),
    }
    refused.extend(obstacles.refused);
    if let Err(why) = Kernel::find(&config.boot, &from) {
        refused.push(format!("the old kernel cannot be started again: {why}"));
    }
    if host::numbers(&plan.to) < host::numbers(&from) {
        refused
            .push(format!("{} is older than {from}, which runs: an older kernel cannot restore the images", plan.to));
    }
    if plan.to == from {
        refused.push(format!("{from} is already running"));
    }
    if let Some(journal) = Journal::read(&config.state)? {
        if journal.decide(&from, &host::boot()) != Decision::Nothing {
            refused.push(format!("a switch from {} to {} has not ended", journal.from, journal.to));
        }
        refused.extend(
            journal
                .filling()
                .map(|unit| format!("{unit}: its memory is still being fetched since the previous switch")),
        );
    }
    let criu = Criu::new(&config.criu);
    let mut units = Vec::new();
    for (name, settings) in &config.units {
        match inspect_unit(name, &criu) {
            Ok(unit) => units.push(Unit { health: settings.health.clone(), ..unit }),
            Err(Error::Refused(texts)) => refused.extend(texts.into_iter().map(|text| format!("{name}: {text}"))),
            Err(error) => return Err(error),
        }
    }
    let region = region(config).unwrap_or_else(|why| {
        refused.push(why);
        None
    });
    let mut handover = None;
    if units.len() == config.units.len() {
        match images(plan, &from, &units) {
            Ok(found) => handover = found,
            Err(Error::Refused(texts)) => refused.extend(texts),
            Err(error) => return Err(error),
        }
    }
    // an invalid name has been refused above
    let names: Vec<String> =
        config.units.keys().filter_map(|name| complete_unit_name(name).ok()).map(|name| name.to_string()).collect();
    let delayed = StartOrder::read()?.delayed_by(&names);
    refused.extend(delayed.refused);
    if !refused.is_empty() {
        return Err(Error::Refused(refused));
    }
    let (watchdog, watchdog_warning) = match watchdog::usable(&config.watchdog, config.watchdog_limit_s, &plan.to) {
        Ok(watchdog) => (Some(watchdog), None),
        Err(why) => (None, Some(format!("a kernel that hangs is not reset automatically: {why}"))),
    };
    let (crash, straight) = match config.crash_kernel {
        false => (None, None),
        true => match CrashKernel::of(config, &plan.to) {
            Ok(crash) => (Some(crash), None),
            Err(why) => (None, Some(format!("after a panic of {} the boot loader starts {from}: {why}", plan.to))),
        },
    };
    let warning = boot_loader::warning(&config.boot, &from);
    let cautions = warning.into_iter().chain(straight).chain(obstacles.cautions).collect();
    let pids = units.iter().map(|unit| highest_thread_id(unit.pid)).collect::<Result<Vec<_>, _>>()?;
    Ok(Journal {
        v: 1,
        from,
        to: plan.to.clone(),
        boot: Some(host::boot()),
        pid_max: pids.into_iter().max().unwrap_or(0),
        units,
        delayed: delayed.units,
        remaining: RemainingUnits::of(&names)?,
        watchdog,
        watchdog_warning,
        crash,
        cautions,
        region,
        handover,
        config: config.clone(),
        ..Journal::default()
    })
}

/// Returns the memory to hand over to the next kernel for images of all units, if it is used; checks that there is room
/// for them.
fn images(plan: &Plan, from: &str, units: &[Unit]) -> Result<Option<Handover>, Error> {
    let (config, pids) = (&plan.config, units.iter().map(|unit| unit.pid));
    if config.handover().is_none() {
        return check_space(pids, &config.images()).map(|()| None);
    }
    let bytes = pids.map(memory_bytes).sum::<Result<u64, Error>>()?;
    let (running, next) = command_line::both_kernels(&config.append)?;
    Handover::of(config, bytes, (from, &plan.to), (&running, &next)).map(Some).map_err(Error::Refused)
}

/// Returns the memory region that holds the images, if one does. The journal must survive any loss of power.
fn region(config: &Config) -> Result<Option<Region>, String> {
    let (running, next) = command_line::both_kernels(&config.append).map_err(|error| error.with_causes())?;
    if Region::of(&config.state, &running, &next)?.is_some() {
        return Err(format!("{} is located in memory: the state must be on a disk", config.state.display()));
    }
    Region::of(&config.images(), &running, &next)
}

/// Examines one unit, without its configuration.
fn inspect_unit(name: &str, criu: &Criu) -> Result<Unit, Error> {
    let pid = unit_root_process(name)?;
    let unit = complete_unit_name(name)?.to_string();
    let properties = unit_properties(&unit)?;
    if let Some(text) = dropin_of(&unit, &properties)? {
        let text = text.trim_end().replace('\n', "\\n");
        let path = dropin_path(&unit);
        return Err(Error::refused(format_args!("its sandbox is closed; put this into {path} and restart it: {text}")));
    }
    if let Some(socket) = socket_units(&properties).next() {
        return Err(Error::refused(format_args!(
            "{socket} starts it, and systemd holds its sockets: systemctl disable --now {socket}"
        )));
    }
    let report = check(pid, criu)?;
    report.require_no_refusal()?;
    let VolatileObjects { lost, directories } = report.volatile;
    if !lost.is_empty() {
        let text = |(pid, text): (i32, String)| format!("process {pid} ({}) {text}", process_name(pid));
        return Err(Error::Refused(lost.into_iter().map(text).collect()));
    }
    let ports = tcp_ports(pid)?;
    if ports.is_empty() {
        return Err(Error::refused("has no TCP port"));
    }
    Ok(Unit { name: unit, pid, ports, health: Vec::new(), directories })
}

/// Returns the highest id among the threads of a process and all below it.
fn highest_thread_id(pid: i32) -> Result<u32, Error> {
    let tasks = tree(pid)?.into_iter().filter_map(|process| process.tasks().ok());
    Ok(tasks.flatten().flatten().map(|task| task.tid).max().unwrap_or(pid).unsigned_abs())
}

/// Goes to another kernel. Returns only on failure; the units then run on here as before.
///
/// # Errors
/// Always: there was an obstacle, or a phase failed and the others were rolled back.
pub fn switch(plan: &Plan, observer: Observer<'_>) -> Result<std::convert::Infallible, Error> {
    let state = &plan.config.state;
    let lock = lock_state(state)?;
    if roll_back_locked(state)?.is_some() {
        let text = "a killed switch was rolled back";
        report(observer, EventKind::Warning { text: text.into() });
    }
    // not in the list: a refusal leaves the earlier journal as it is, and the journal and the guardian of all phases need this result
    let begun = now_ns();
    report(observer, EventKind::PhaseStarted { operation: "switch".into(), phase: "check".into() });
    let mut journal = check_switch(plan)?;
    record_phase(&mut journal, "check", begun, observer);
    for text in journal.warnings() {
        report(observer, EventKind::Warning { text });
    }
    let images = plan.config.images();
    let _ = Directory::open(&images).and_then(Directory::remove_all);
    let mounted = create_handover(&mut journal, observer)?;
    Directory::make(&images)?;
    let guardian = Guardian::start(state, &lock)?;
    journal.write()?;
    let mut switch = Switch {
        plan,
        journal,
        observer,
        workers: Vec::new(),
        messages: None,
        mounts: Vec::new(),
        watch: None,
        disks: None,
        port_guard: port_guard(),
        guardian,
        _handover: mounted,
        _lock: lock,
    };
    let error = match run_blocking(&mut switch, &phases()) {
        Err(failed) => failed.error,
        Ok(()) => Error::Step { what: "start the other kernel", why: "kexec returned without an error".into() },
    };
    switch.aborted(&error);
    switch.guardian.dismiss();
    Err(error)
}

/// Makes the memory for the images, if it is to be handed over.
fn create_handover(journal: &mut Journal, observer: Observer<'_>) -> Result<Option<MountedHandover>, Error> {
    let Some(handover) = &journal.handover else { return Ok(None) };
    let begun = now_ns();
    report(observer, EventKind::PhaseStarted { operation: "switch".into(), phase: "memory".into() });
    let mounted = handover.create()?;
    record_phase(journal, "memory", begun, observer);
    Ok(Some(mounted))
}

fn lock_state(state: &Path) -> Result<JournalLock, Error> {
    Journal::lock(state, OTHER_SWITCH_TIMEOUT)?.ok_or_else(|| {
        Error::refused("another switch is in progress, or memory of the last one is still being fetched")
    })
}

/// Rolls back a switch that was killed together with its guardian. The caller holds the lock.
fn roll_back_locked(state: &Path) -> Result<Option<Journal>, Error> {
    let Some(mut journal) = Journal::read(state)?.filter(guardian::is_interrupted) else { return Ok(None) };
    guardian::roll_back(&mut journal).map(|()| Some(journal))
}

/// Rolls back a switch that was killed, as a command of its own; returns the journal afterwards, or `None` if there was
/// nothing to roll back.
///
/// # Errors
/// Another switch is in progress, or the journal cannot be read or written.
pub fn roll_back(state: &Path) -> Result<Option<Journal>, Error> {
    if guardian::find_interrupted(state)?.is_none() {
        return Ok(None);
    }
    let _lock = lock_state(state)?;
    roll_back_locked(state)
}

fn report(observer: Observer<'_>, kind: EventKind) {
    observer(&Event::new(now_ns(), None, kind));
}

fn record_phase(journal: &mut Journal, phase: &str, begun: u64, observer: Observer<'_>) {
    let duration_ns = now_ns() - begun;
    journal.record_timing(phase, duration_ns / 1000);
    report(observer, EventKind::PhaseEnded { operation: "switch".into(), phase: phase.into(), duration_ns });
}

/// An active switch.
struct Switch<'p> {
    plan: &'p Plan,
    journal: Journal,
    observer: Observer<'p>,
    workers: Vec<Worker>,
    messages: Option<Receiver<(usize, WorkerMessage)>>,
    mounts: Vec<String>,
    watch: Option<Armed>,
    disks: Option<Disks>,
    port_guard: PortGuard,
    guardian: Guardian,
    /// The memory is handed over as long as this is held.
    _handover: Option<MountedHandover>,
    _lock: JournalLock,
}

/// The checkpoint of one unit, in a thread of its own.
struct Worker {
    unit: String,
    permission: Option<Sender<()>>,
    thread: JoinHandle<Result<Checkpoint, Error>>,
}

/// Message of a checkpoint to the switch.
enum WorkerMessage {
    Event(Box<Event>),
    Reached(Moment),
    Ended,
}

impl Operation for Switch<'_> {
    type Error = Error;
    const NAME: &'static str = "switch";

    fn faults(&self) -> &Faults {
        &self.plan.faults
    }

    fn report(&mut self, event: EventKind) {
        report(self.observer, event);
    }

    fn ended(&mut self, phase: &str, duration_ns: u64, _error: Option<&Error>) {
        self.journal.record_timing(phase, duration_ns / 1000);
    }
}

impl Switch<'_> {
    /// Raises the guard in front of all ports of the units, or changes it.
    fn raise(&mut self, scope: DropScope) -> Result<(), Error> {
        self.port_guard.raise(scope, &self.journal.ports())
    }

    /// Records the end of a switch that was rolled back.
    fn aborted(&mut self, why: &Error) {
        self.journal.why = Some(why.to_string());
        if let Err(error) = self.journal.advance(State::Aborted) {
            tracing::error!("the journal could not be written: {error}");
        }
        let _ = self.journal.drop_images();
    }

    /// Returns a number that changes when a part of an image was written, or a criu has logged something.
    fn progress(&self) -> u64 {
        let written = Process::myself().and_then(|own| own.io()).map_or(0, |io| io.wchar);
        let logs = self.journal.units.iter().map(|unit| self.journal.image(&unit.name).join(DUMP_LOG));
        written + logs.filter_map(|log| log.metadata().ok()).map(|log| log.len()).sum::<u64>()
    }

    /// Waits until every checkpoint has reached a moment.
    fn wait_for_moment(&mut self, moment: Moment) -> Result<(), Error> {
        let mut limit = StallLimit::new(STALL_TIMEOUT, Instant::now());
        let mut reached_by = vec![false; self.workers.len()];
        while reached_by.iter().any(|reached_by| !reached_by) {
            match self.messages.as_ref().and_then(|messages| messages.recv_timeout(PROGRESS_INTERVAL).ok()) {
                Some((_, WorkerMessage::Event(event))) => (self.observer)(&event),
                Some((at, WorkerMessage::Reached(reached))) if reached == moment => reached_by[at] = true,
                Some((_, WorkerMessage::Reached(_))) => {}
                Some((at, WorkerMessage::Ended)) => {
                    let worker = self.workers.remove(at);
                    let why = match worker.thread.join() {
                        Ok(Err(error)) => error.to_string(),
                        _ => "it ended".into(),
                    };
                    return Err(Error::Unit { unit: worker.unit, why });
                }
                None if limit.is_reached(Instant::now(), || self.progress()) => {
                    let why = format!("there was no progress for {} s", STALL_TIMEOUT.as_secs());
                    return Err(Error::Step { what: "freeze", why });
                }
                None => {}
            }
        }
        Ok(())
    }
}

/// Loads the new kernel into memory; its read from disk is not part of the outage.
fn preload(switch: &mut Switch<'_>) -> Result<(), Error> {
    let config = &switch.plan.config;
    let driver = switch.journal.watchdog.as_ref().map(|watchdog| watchdog.driver.as_str());
    let crash = switch.journal.crash.as_ref().map(|crash| crash.load(config, &switch.plan.to)).transpose()?;
    Kernel::find(&config.boot, &switch.plan.to).map_err(Error::refused)?.load(
        &config.append,
        driver,
        crash.as_ref(),
    )?;
    switch.disks.insert(Disks::open()?).sync()
}

/// Stops the units that stay, before passes over memory: everything that changes after the passes makes the freeze
/// longer.
fn stop_remaining(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.journal.has_stopped = true;
    switch.journal.write()?;
    switch.journal.remaining.stop(switch.journal.stop_limit())
}

fn start_remaining(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.journal.remaining.start(switch.journal.stop_limit())
}

/// Makes a checkpoint of each unit at the same time, up to the freeze of its processes.
fn run_passes(switch: &mut Switch<'_>) -> Result<(), Error> {
    let (sender, messages) = channel();
    switch.messages = Some(messages);
    for (at, unit) in switch.journal.units.iter().enumerate() {
        let options = CheckpointOptions {
            pid: unit.pid,
            image: switch.journal.image(&unit.name),
            criu: Criu::new(&switch.plan.config.criu),
            leave_running: false,
            form: None,
            guard: Guard::None,
            passes: switch.plan.passes,
            key: MACHINE_KEY.into(),
            faults: Faults::none(),
        };
        let (permission, permissions) = channel();
        let (sender, name) = (sender.clone(), unit.name.clone());
        let thread = std::thread::spawn(move || run_checkpoint(&options, &name, at, &sender, permissions));
        switch.workers.push(Worker { unit: unit.name.clone(), permission: Some(permission), thread });
    }
    switch.wait_for_moment(Moment::Freezing)
}

/// Runs one checkpoint: it waits at each moment until it may continue, and never reaches its end.
fn run_checkpoint(
    options: &CheckpointOptions,
    unit: &str,
    at: usize,
    sender: &Sender<(usize, WorkerMessage)>,
    permissions: Receiver<()>,
) -> Result<Checkpoint, Error> {
    let (send, permissions) = (Mutex::new(sender.clone()), Mutex::new(permissions));
    let send = |message| {
        // no receiver is left when the switch has been aborted
        let _ = send.lock().unwrap_or_else(PoisonError::into_inner).send((at, message));
    };
    let moment = |moment| {
        send(WorkerMessage::Reached(moment));
        let permissions = permissions.lock().unwrap_or_else(PoisonError::into_inner).recv();
        permissions.map_err(|_| Error::Unit { unit: unit.to_owned(), why: "the switch was aborted".into() })
    };
    let done = checkpoint_with_hook(options, &moment, &|event| send(WorkerMessage::Event(Box::new(event.clone()))));
    send(WorkerMessage::Ended);
    done
}

/// Makes new connections wait; those that are being made finish.
fn drain(switch: &mut Switch<'_>) -> Result<(), Error> {
    let (ports, end) = (switch.journal.ports(), Instant::now() + DRAIN_TIMEOUT);
    loop {
        match pending_connections(&ports) {
            0 => return Ok(()),
            left if Instant::now() > end => {
                return Err(Error::Step { what: "drain", why: format!("{left} connections were not accepted") });
            }
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Raises the guard in front of the ports that the units use by now.
fn guard(switch: &mut Switch<'_>) -> Result<(), Error> {
    update_ports(&mut switch.journal)?;
    switch.raise(DropScope::All)
}

/// Adds ports of connections that units have made since they were examined. Returns true if there are new ones.
fn update_ports(journal: &mut Journal) -> Result<bool, Error> {
    let mut more = false;
    for unit in &mut journal.units {
        more |= unit.add_ports(&tcp_ports(unit.pid)?);
    }
    Ok(more)
}

fn freeze(switch: &mut Switch<'_>) -> Result<(), Error> {
    for worker in &switch.workers {
        if let Some(permission) = &worker.permission {
            // a checkpoint that has ended reports the reason
            let _ = permission.send(());
        }
    }
    switch.wait_for_moment(Moment::Sealed)
}

/// Aborts every checkpoint that waits; its processes run on.
fn abort_checkpoints(switch: &mut Switch<'_>) -> Result<(), Error> {
    for worker in &mut switch.workers {
        worker.permission = None;
    }
    for worker in switch.workers.drain(..) {
        if worker.thread.join().is_ok_and(|done| done.is_ok()) {
            return Err(Error::Unit { unit: worker.unit, why: "its processes ended with their checkpoint".into() });
        }
    }
    Ok(())
}

/// Makes the images hold the units. Files that these wrote without fsync are on disk before: otherwise an image would
/// find files that are older than itself after a loss of power.
fn seal(switch: &mut Switch<'_>) -> Result<(), Error> {
    // ports that were opened while the guard was raised; now no process opens any
    if update_ports(&mut switch.journal)? {
        switch.raise(DropScope::All)?;
    }
    if let Some(disks) = &switch.disks {
        disks.sync()?;
    }
    switch.journal.mounts = writable_now()?;
    switch.guardian.hold()?;
    switch.journal.advance(State::Sealed)
}

/// Revokes the seal. No process may run on while the journal says that the images hold the units: a later boot would
/// restore them.
fn unseal(switch: &mut Switch<'_>) -> Result<(), Error> {
    if let Err(error) = switch.journal.advance(State::Aborted) {
        tracing::error!("the seal cannot be revoked, so the machine is reset and restores the units: {error}");
        reset();
    }
    switch.guardian.release();
    Ok(())
}

/// Arms the watchdog: from here on a machine that hangs is reset, and starts with the old kernel.
fn arm_watchdog(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.watch = switch.journal.watchdog.as_ref().map(Watchdog::arm).transpose()?;
    Ok(())
}

fn disarm_watchdog(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.watch.take().map_or(Ok(()), Armed::disarm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_taken_back_comes_last() {
        let names: Vec<&str> = phases().iter().map(|phase| phase.name).collect();
        let place = |name| names.iter().position(|known| *known == name).unwrap();
        assert!(place("preload") < place("stop") && place("stop") < place("freeze"));
        assert!(place("close") < place("drain") && place("drain") < place("guard"));
        assert!(place("guard") < place("freeze") && place("freeze") < place("seal"));
        // the journal is on disk before the disks become read-only
        assert!(place("seal") < place("still"));
        assert_eq!(names.last(), Some(&"jump"));
    }
}
