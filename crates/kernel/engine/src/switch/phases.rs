//! The old kernel's side: one list of phases, each with its inverse.

use super::boot_loader;
use super::command_line;
use super::config::{Config, Memory};
use super::crash_kernel::Crash;
use super::guardian::{self, Guardian};
use super::handover::{Handover, Held};
use super::journal::{Decision, Journal, State, Unit};
use super::obstacles;
use super::port_guard::Front;
use super::region::Region;
use super::remaining_units::Stays;
use super::stall_limit::Limit;
use super::start_order::Order;
use super::system::{Disks, Kernel, jump, missing, reset, still, unstill, writable_now};
use super::unit::{dropin_of, dropin_path, ports, properties, sockets, waiting};
use super::watchdog::{self, Armed, Watchdog};
use crate::checkpoint::{DUMP_LOG, memory_bytes, check_space};
use crate::guard::DropScope;
use crate::process_tree::{complete_unit_name, unit_root_process, tree};
use crate::progress::now_ns;
use crate::volatile::VolatileObjects;
use crate::{
    Checkpoint, CheckpointOptions, Criu, Error, Guard, MACHINE_KEY, Moment, Observer, check, checkpoint_with_hook, host,
};
use procfs::process::Process;
use rustix::process::{Signal, getpid, kill_process};
use std::fs::File;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind};
use stillpoint_host::trusted::Directory;

/// Time for connections that are being made to finish before the freeze.
const DRAIN: Duration = Duration::from_secs(10);
/// Time within which another switch ends after it reports its end.
const ANOTHER: Duration = Duration::from_secs(3);
/// Interval of the test that checkpoints make progress.
const LOOK: Duration = Duration::from_secs(1);
/// Time without progress after which a checkpoint, and the switch with it, is aborted; one that makes progress has no
/// limit.
const STANDSTILL: Duration = Duration::from_secs(120);

/// Description of a switch.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Release of the kernel to go to.
    pub to: String,
    /// All other settings.
    pub config: Config,
    /// Maximum of passes over memory while the units run.
    pub passes: u32,
    /// For tests: fail in this phase.
    pub fail_in: Option<String>,
    /// For tests: the machine loses its power when this phase begins.
    pub lose_power_in: Option<String>,
    /// For tests: the tool is killed when this phase begins.
    pub killed_in: Option<String>,
}

/// A phase, and its inverse.
struct Phase {
    name: &'static str,
    run: fn(&mut Switch<'_>) -> Result<(), Error>,
    undo: fn(&mut Switch<'_>) -> Result<(), Error>,
}

fn nothing(_: &mut Switch<'_>) -> Result<(), Error> {
    Ok(())
}

/// The order of a switch; its inverses run from the phase that failed to the front.
const PHASES: &[Phase] = &[
    Phase { name: "preload", run: preload, undo: |_| Kernel::unload() },
    Phase { name: "stop", run: stop, undo: start },
    Phase { name: "passes", run: passes, undo: dismiss },
    Phase { name: "close", run: |s| s.raise(DropScope::Syn), undo: |s| s.front.lower() },
    Phase { name: "drain", run: drain, undo: nothing },
    Phase { name: "guard", run: guard, undo: nothing },
    Phase { name: "freeze", run: freeze, undo: dismiss },
    Phase { name: "seal", run: seal, undo: unseal },
    Phase { name: "still", run: |s| still().map(|mounts| s.mounts = mounts), undo: |s| unstill(&s.mounts) },
    Phase { name: "watch", run: watch, undo: unwatch },
    Phase { name: "jump", run: |_| Err(jump()), undo: nothing },
];

/// Finds all obstacles to a switch at once. Nothing is touched.
pub fn check_switch(plan: &Plan) -> Result<Journal, Error> {
    let (config, from) = (&plan.config, host::kernel());
    let mut refused = missing(config);
    let places = [config.state.clone(), config.images()];
    refused.extend(places.iter().filter_map(|dir| Some(Directory::check(dir).err()?.to_string())));
    let mut obstacles = obstacles::passphrases(&[places[0].as_path(), places[1].as_path(), Path::new("/")]);
    match Kernel::find(&config.boot, &plan.to) {
        Ok(kernel) => {
            let loading = obstacles::loading(&kernel.image);
            obstacles.refused.extend(loading.refused);
            obstacles.cautions.extend(loading.cautions);
        }
        Err(why) => refused.push(why),
    }
    refused.extend(obstacles.refused);
    if let Err(why) = Kernel::find(&config.boot, &from) {
        refused.push(format!("no way back: {why}"));
    }
    if host::numbers(&plan.to) < host::numbers(&from) {
        refused.push(format!("{} is older than {from}, which runs: images do not go back", plan.to));
    }
    if plan.to == from {
        refused.push(format!("{from} runs already"));
    }
    if let Some(journal) = Journal::read(&config.state)? {
        if journal.decide(&from, &host::boot()) != Decision::Nothing {
            refused.push(format!("a switch from {} to {} has not ended", journal.from, journal.to));
        }
        refused.extend(journal.filling().map(|unit| format!("{unit}: its memory still comes from the switch before")));
    }
    let criu = Criu::new(&config.criu);
    let mut units = Vec::new();
    for (name, settings) in &config.units {
        match look(name, &criu) {
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
    let held = Order::read()?.held(&names);
    refused.extend(held.refused);
    if !refused.is_empty() {
        return Err(Error::Refused(refused));
    }
    let (watchdog, unwatched) = match watchdog::usable(&config.watchdog, config.watchdog_limit_s, &plan.to) {
        Ok(watchdog) => (Some(watchdog), None),
        Err(why) => (None, Some(format!("a kernel that hangs stays so until somebody resets the machine: {why}"))),
    };
    let (crash, straight) = match config.crash_kernel {
        false => (None, None),
        true => match Crash::of(config, &plan.to) {
            Ok(crash) => (Some(crash), None),
            Err(why) => (None, Some(format!("after a panic of {} the boot loader starts {from}: {why}", plan.to))),
        },
    };
    let warning = boot_loader::warning(&config.boot, &from);
    let cautions = warning.into_iter().chain(straight).chain(obstacles.cautions).collect();
    let pids = units.iter().map(|unit| highest(unit.pid)).collect::<Result<Vec<_>, _>>()?;
    Ok(Journal {
        v: 1,
        from,
        to: plan.to.clone(),
        boot: Some(host::boot()),
        state: State::Prepared,
        why: None,
        begun_on: Vec::new(),
        pid_max: pids.into_iter().max().unwrap_or(0),
        units,
        held: held.units,
        stays: Stays::of(&names)?,
        has_stopped: false,
        watchdog,
        unwatched,
        crash,
        cautions,
        region,
        handover,
        woken: None,
        unguarded: Vec::new(),
        mounts: Vec::new(),
        config: config.clone(),
        timings: Vec::new(),
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
    let (running, next) = command_line::both(&config.append)?;
    Handover::of(config, bytes, (from, &plan.to), (&running, &next)).map(Some).map_err(Error::Refused)
}

/// Returns the memory region that holds the images, if one does. The journal must survive any loss of power.
fn region(config: &Config) -> Result<Option<Region>, String> {
    let (running, next) = command_line::both(&config.append).map_err(|error| error.with_causes())?;
    if Region::of(&config.state, &running, &next)?.is_some() {
        return Err(format!("{} lies in memory: the state must be on a disk", config.state.display()));
    }
    Region::of(&config.images(), &running, &next)
}

/// Examines one unit, without its configuration.
fn look(name: &str, criu: &Criu) -> Result<Unit, Error> {
    let pid = unit_root_process(name)?;
    let unit = complete_unit_name(name)?.to_string();
    let properties = properties(&unit)?;
    if let Some(text) = dropin_of(&unit, &properties)? {
        let text = text.trim_end().replace('\n', "\\n");
        let path = dropin_path(&unit);
        return Err(Error::Refused(vec![format!(
            "its sandbox is closed; put this into {path} and restart it: {text}"
        )]));
    }
    if let Some(socket) = sockets(&properties).next() {
        let text = format!("{socket} starts it, and systemd holds its sockets: systemctl disable --now {socket}");
        return Err(Error::Refused(vec![text]));
    }
    let report = check(pid, criu)?;
    report.require_no_refusal()?;
    let VolatileObjects { lost, directories } = report.volatile;
    if !lost.is_empty() {
        let text = |(pid, text): (i32, String)| format!("process {pid} ({}) {text}", crate::process_tree::process_name(pid));
        return Err(Error::Refused(lost.into_iter().map(text).collect()));
    }
    let ports = ports(pid)?;
    if ports.is_empty() {
        return Err(Error::Refused(vec!["has no port of TCP".into()]));
    }
    Ok(Unit { name: unit, pid, ports, health: Vec::new(), directories })
}

/// Returns the highest id among the threads of a process and all below it.
fn highest(pid: i32) -> Result<u32, Error> {
    let tasks = tree(pid)?.into_iter().filter_map(|process| process.tasks().ok());
    Ok(tasks.flatten().flatten().map(|task| task.tid).max().unwrap_or(pid).unsigned_abs())
}

/// Goes to another kernel. Returns only on failure; the units then run on here as before.
pub fn switch(plan: &Plan, observer: Observer<'_>) -> Result<std::convert::Infallible, Error> {
    let state = &plan.config.state;
    let lock = locked(state)?;
    if mend(state)?.is_some() {
        let text = "a switch that was killed had left something, which was taken back";
        tell(observer, EventKind::Warning { text: text.into() });
    }
    let begun = now_ns();
    tell(observer, EventKind::PhaseStarted { operation: "switch".into(), phase: "check".into() });
    let mut journal = check_switch(plan)?;
    took(&mut journal, "check", begun, observer);
    for text in journal.warnings() {
        tell(observer, EventKind::Warning { text });
    }
    let images = plan.config.images();
    let _ = Directory::open(&images).and_then(Directory::remove_all);
    let handed = hand_over(&mut journal, observer)?;
    Directory::make(&images)?;
    let guardian = Guardian::start(state, &lock)?;
    journal.write()?;
    let mut switch = Switch {
        plan,
        journal,
        observer,
        workers: Vec::new(),
        told: None,
        mounts: Vec::new(),
        watch: None,
        disks: None,
        front: Front::default(),
        guardian,
        _handed: handed,
        _lock: lock,
    };
    let (reached, error) = switch.forward();
    switch.back(reached, &error);
    switch.guardian.dismiss();
    Err(error)
}

/// Makes the memory for the images, if it is to be handed over.
fn hand_over(journal: &mut Journal, observer: Observer<'_>) -> Result<Option<Held>, Error> {
    let Some(handover) = &journal.handover else { return Ok(None) };
    let begun = now_ns();
    tell(observer, EventKind::PhaseStarted { operation: "switch".into(), phase: "memory".into() });
    let held = handover.make()?;
    took(journal, "memory", begun, observer);
    Ok(Some(held))
}

fn locked(state: &Path) -> Result<File, Error> {
    let end = Instant::now() + ANOTHER;
    loop {
        match Journal::lock(state)? {
            Some(lock) => return Ok(lock),
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            None => {
                let text = "another switch is under way, or memory of the last one still comes";
                return Err(Error::Refused(vec![text.into()]));
            }
        }
    }
}

/// Rolls back a switch that was killed together with its guardian. The caller holds the lock.
fn mend(state: &Path) -> Result<Option<Journal>, Error> {
    let Some(mut journal) = Journal::read(state)?.filter(guardian::is_left) else { return Ok(None) };
    guardian::mend(&mut journal).map(|()| Some(journal))
}

/// Rolls back a switch that was killed, as a command of its own; returns the journal afterwards, or `None` if there was
/// nothing to roll back.
pub fn take_back(state: &Path) -> Result<Option<Journal>, Error> {
    if guardian::left_behind(state)?.is_none() {
        return Ok(None);
    }
    let _lock = locked(state)?;
    mend(state)
}

fn tell(observer: Observer<'_>, kind: EventKind) {
    observer(&Event::new(now_ns(), None, kind));
}

fn took(journal: &mut Journal, phase: &str, begun: u64, observer: Observer<'_>) {
    let duration_ns = now_ns() - begun;
    journal.took(phase, duration_ns / 1000);
    tell(observer, EventKind::PhaseEnded { operation: "switch".into(), phase: phase.into(), duration_ns });
}

/// An active switch.
struct Switch<'p> {
    plan: &'p Plan,
    journal: Journal,
    observer: Observer<'p>,
    workers: Vec<Worker>,
    told: Option<Receiver<(usize, Told)>>,
    mounts: Vec<String>,
    watch: Option<Armed>,
    disks: Option<Disks>,
    front: Front,
    guardian: Guardian,
    /// The memory is handed over as long as this is held.
    _handed: Option<Held>,
    _lock: File,
}

/// The checkpoint of one unit, in a thread of its own.
struct Worker {
    unit: String,
    go_on: Option<Sender<()>>,
    thread: JoinHandle<Result<Checkpoint, Error>>,
}

/// Message of a checkpoint to the switch.
enum Told {
    Event(Box<Event>),
    Reached(Moment),
    Ended,
}

impl Switch<'_> {
    /// Runs phase after phase; returns how many were begun, and the reason of the failure.
    fn forward(&mut self) -> (usize, Error) {
        for (at, phase) in PHASES.iter().enumerate() {
            tell(self.observer, EventKind::PhaseStarted { operation: "switch".into(), phase: phase.name.into() });
            let begun = now_ns();
            if self.plan.lose_power_in.as_deref() == Some(phase.name) {
                reset();
            }
            if self.plan.killed_in.as_deref() == Some(phase.name) {
                let _ = kill_process(getpid(), Signal::KILL);
            }
            let done = match &self.plan.fail_in {
                Some(name) if name == phase.name => {
                    Err(Error::Step { what: phase.name, why: "a test made it fail".into() })
                }
                _ => (phase.run)(self),
            };
            took(&mut self.journal, phase.name, begun, self.observer);
            if let Err(error) = done {
                return (at + 1, error);
            }
        }
        (PHASES.len(), Error::Step { what: "jump", why: "nothing came of it".into() })
    }

    /// Raises the guard in front of all ports of the units, or changes it.
    fn raise(&mut self, scope: DropScope) -> Result<(), Error> {
        self.front.raise(scope, &self.journal.ports())
    }

    /// Runs the inverses of the phases that were begun, last first.
    fn back(&mut self, begun: usize, why: &Error) {
        for phase in PHASES[..begun].iter().rev() {
            if let Err(error) = (phase.undo)(self) {
                tracing::error!(phase = phase.name, "could not be taken back: {error}");
            }
        }
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
    fn until(&mut self, moment: Moment) -> Result<(), Error> {
        let mut limit = Limit::new(STANDSTILL, Instant::now());
        let mut there = vec![false; self.workers.len()];
        while there.iter().any(|there| !there) {
            match self.told.as_ref().and_then(|told| told.recv_timeout(LOOK).ok()) {
                Some((_, Told::Event(event))) => (self.observer)(&event),
                Some((at, Told::Reached(reached))) if reached == moment => there[at] = true,
                Some((_, Told::Reached(_))) => {}
                Some((at, Told::Ended)) => {
                    let worker = self.workers.remove(at);
                    let why = match worker.thread.join() {
                        Ok(Err(error)) => error.to_string(),
                        _ => "it ended".into(),
                    };
                    return Err(Error::Unit { unit: worker.unit, why });
                }
                None if limit.is_over(Instant::now(), || self.progress()) => {
                    let why = format!("nothing went on for {} s", STANDSTILL.as_secs());
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
    let refused = |why| Error::Refused(vec![why]);
    let driver = switch.journal.watchdog.as_ref().map(|watchdog| watchdog.driver.as_str());
    let crash = switch.journal.crash.as_ref().map(|crash| crash.load(config, &switch.plan.to)).transpose()?;
    Kernel::find(&config.boot, &switch.plan.to).map_err(refused)?.load(&config.append, driver, crash.as_ref())?;
    switch.disks.insert(Disks::open()?).sync()
}

/// Stops the units that stay, before passes over memory: everything that changes after the passes makes the freeze
/// longer.
fn stop(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.journal.has_stopped = true;
    switch.journal.write()?;
    switch.journal.stays.stop(switch.journal.stop_limit())
}

fn start(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.journal.stays.start(switch.journal.stop_limit())
}

/// Makes a checkpoint of each unit at the same time, up to the freeze of its processes.
fn passes(switch: &mut Switch<'_>) -> Result<(), Error> {
    let (tell, told) = channel();
    switch.told = Some(told);
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
            fail_before_seal: false,
        };
        let (go_on, heard) = channel();
        let (tell, name) = (tell.clone(), unit.name.clone());
        let thread = std::thread::spawn(move || checkpoint_of(&options, &name, at, &tell, heard));
        switch.workers.push(Worker { unit: unit.name.clone(), go_on: Some(go_on), thread });
    }
    switch.until(Moment::Freezing)
}

/// Runs one checkpoint: it waits at each moment until it may continue, and never reaches its end.
fn checkpoint_of(
    options: &CheckpointOptions,
    unit: &str,
    at: usize,
    tell: &Sender<(usize, Told)>,
    heard: Receiver<()>,
) -> Result<Checkpoint, Error> {
    let (say, heard) = (Mutex::new(tell.clone()), Mutex::new(heard));
    let say = |told| {
        // no receiver is left when the switch has been aborted
        let _ = say.lock().unwrap_or_else(PoisonError::into_inner).send((at, told));
    };
    let moment = |moment| {
        say(Told::Reached(moment));
        let heard = heard.lock().unwrap_or_else(PoisonError::into_inner).recv();
        heard.map_err(|_| Error::Unit { unit: unit.to_owned(), why: "the switch was given up".into() })
    };
    let done = checkpoint_with_hook(options, &moment, &|event| say(Told::Event(Box::new(event.clone()))));
    say(Told::Ended);
    done
}

/// Makes new connections wait; those that are being made finish.
fn drain(switch: &mut Switch<'_>) -> Result<(), Error> {
    let (ports, end) = (switch.journal.ports(), Instant::now() + DRAIN);
    loop {
        match waiting(&ports) {
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
    ports_again(&mut switch.journal)?;
    switch.raise(DropScope::All)
}

/// Adds ports of connections that units have made since they were examined. Returns true if there are new ones.
fn ports_again(journal: &mut Journal) -> Result<bool, Error> {
    let mut more = false;
    for unit in &mut journal.units {
        more |= unit.speaks(&ports(unit.pid)?);
    }
    Ok(more)
}

fn freeze(switch: &mut Switch<'_>) -> Result<(), Error> {
    for worker in &switch.workers {
        if let Some(go_on) = &worker.go_on {
            // a checkpoint that has ended reports the reason
            let _ = go_on.send(());
        }
    }
    switch.until(Moment::Sealed)
}

/// Aborts every checkpoint that waits; its processes run on.
fn dismiss(switch: &mut Switch<'_>) -> Result<(), Error> {
    for worker in &mut switch.workers {
        worker.go_on = None;
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
    if ports_again(&mut switch.journal)? {
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
        tracing::error!("the seal cannot be taken back, so the machine starts anew and restores: {error}");
        reset();
    }
    switch.guardian.release();
    Ok(())
}

/// Arms the watchdog: from here on a machine that hangs is reset, and starts with the old kernel.
fn watch(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.watch = switch.journal.watchdog.as_ref().map(Watchdog::arm).transpose()?;
    Ok(())
}

fn unwatch(switch: &mut Switch<'_>) -> Result<(), Error> {
    switch.watch.take().map_or(Ok(()), Armed::disarm)
}

impl From<Memory> for crate::RestoreMode {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::OnDemand => crate::RestoreMode::OnDemand,
            Memory::Eager => crate::RestoreMode::Eager,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_taken_back_comes_last() {
        let names: Vec<&str> = PHASES.iter().map(|phase| phase.name).collect();
        let place = |name| names.iter().position(|known| *known == name).unwrap();
        assert!(place("preload") < place("stop") && place("stop") < place("freeze"));
        assert!(place("close") < place("drain") && place("drain") < place("guard"));
        assert!(place("guard") < place("freeze") && place("freeze") < place("seal"));
        // the journal is on disk before the disks become read-only
        assert!(place("seal") < place("still"));
        assert_eq!(names.last(), Some(&"jump"));
    }
}
