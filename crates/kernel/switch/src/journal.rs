//! Journal of a switch on disk, and the decision of a kernel that starts.

use crate::config::Config;
use crate::crash_kernel::CrashKernel;
use crate::handover::Handover;
use crate::region::Region;
use crate::remaining_units::RemainingUnits;
use crate::watchdog::Watchdog;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;
use stillpoint_host::clock::since_1970;
use stillpoint_host::trusted;
use stillpoint_kernel_checkpoint::{Directory, Error, Gap, host};
use stillpoint_operation::{JournalFile, JournalLock};

const FILE_NAME: &str = "journal.json";
const LOCK_NAME: &str = "lock";
/// Version of the journal's format.
const VERSION: u64 = 1;
/// Number of attempts on the old kernel, which is the last that can restore: a failure may have a temporary reason.
const OLD_KERNEL_ATTEMPTS_MAX: usize = 2;

/// State of a switch. It is on disk before the next step begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The units run on the old kernel.
    #[default]
    Prepared,
    /// Every image is sealed and no process has run since: the images hold the units.
    Sealed,
    /// Processes have run since: their files have changed, and no image may be used any more.
    Released,
    /// The units serve, and their guards are lifted.
    Confirmed,
    /// Nothing is left to do.
    Done,
    /// Aborted before the seal, or rolled back: the units run on the old kernel.
    Aborted,
    /// The units were started from their files.
    Cold,
}

/// A unit as it was at the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// Name, with its suffix.
    pub name: String,
    /// The root of its processes.
    pub pid: i32,
    /// TCP ports that belong to it.
    pub ports: Vec<u16>,
    /// Command that tests whether it serves.
    pub health: Vec<String>,
    /// Directories in memory that must exist before its restore.
    #[serde(default)]
    pub directories: Vec<Directory>,
}

/// Duration of one phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Name of the phase.
    pub phase: String,
    /// Release of the kernel that it ran on.
    pub kernel: String,
    /// Duration in microseconds.
    pub duration_us: u64,
    /// Time of its end, in microseconds since 1970. A kernel that has just started knows only the second.
    pub ended_unix_us: u64,
}

/// All data that the next kernel needs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Journal {
    /// Version of the journal's format.
    pub v: u32,
    /// Release of the old kernel.
    pub from: String,
    /// Release of the new kernel.
    pub to: String,
    /// Id of the old kernel's boot in which the switch was begun: there the units run on, and are not in the images.
    pub boot: Option<String>,
    /// State of the switch.
    pub state: State,
    /// Reason for which it did not succeed.
    pub why: Option<String>,
    /// Kernels on which a restore was begun, once for each attempt.
    pub begun_on: Vec<String>,
    /// The highest process id of the images.
    pub pid_max: u32,
    /// Units that go along.
    pub units: Vec<Unit>,
    /// Units that stay, and start after those have been released.
    #[serde(default, rename = "held")]
    pub delayed: Vec<String>,
    /// Units that stay: stopped, cut off, not started again.
    #[serde(default, rename = "stays")]
    pub remaining: RemainingUnits,
    /// True if the units that are to be stopped may have been stopped.
    #[serde(default)]
    pub has_stopped: bool,
    /// The watchdog that resets the machine when a kernel hangs between the kexec and the end.
    pub watchdog: Option<Watchdog>,
    /// Reason why there is no watchdog.
    #[serde(default, rename = "unwatched")]
    pub watchdog_warning: Option<String>,
    /// The crash kernel that returns from a panic of the new kernel without the firmware.
    pub crash: Option<CrashKernel>,
    /// Other warnings for the operator before the switch.
    #[serde(default)]
    pub cautions: Vec<String>,
    /// The memory region that holds the images, if they are not on a disk.
    pub region: Option<Region>,
    /// The memory that holds the images and is handed over to the next kernel, if any.
    pub handover: Option<Handover>,
    /// Number of connections of which both ends were informed that packets pass again, or the reason of a failure.
    #[serde(default, rename = "woken")]
    pub prompted: Option<Result<usize, String>>,
    /// Times in which another process had removed the guard, and its owner had been killed.
    #[serde(default, rename = "unguarded")]
    pub guard_gaps: Vec<Gap>,
    /// Mount points that were writable before the kexec, and are made writable again by a rollback.
    #[serde(default)]
    pub mounts: Vec<String>,
    /// Configuration of the switch.
    pub config: Config,
    /// Duration of each phase.
    pub timings: Vec<Timing>,
}

/// Decision of a kernel that starts about a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// There is no active switch.
    Nothing,
    /// Restore the units from their images.
    Restore,
    /// Go to the old kernel, which restores them.
    Return,
    /// Start them from their files; the images have been used, or cannot be used here.
    Cold(&'static str),
}

impl Journal {
    /// Decides what to do on this kernel, in this boot. An image is used only while no process of it has run, once on
    /// the new kernel and [`OLD_KERNEL_ATTEMPTS_MAX`] times on the old one.
    pub fn decide(&self, kernel: &str, boot: &str) -> Decision {
        match self.state {
            // it starts the next kernel in a moment, or never will
            State::Sealed if self.boot.as_deref() == Some(boot) => Decision::Nothing,
            State::Released => Decision::Cold("the machine stopped after the processes had run on the new kernel"),
            State::Sealed if !self.has_attempt_left() => {
                Decision::Cold("the images could not be restored on the old kernel")
            }
            State::Sealed if kernel == self.from => Decision::Restore,
            State::Sealed if kernel != self.to => {
                Decision::Cold("the machine started with a kernel that is neither of the two of the switch")
            }
            State::Sealed if self.begun_on.is_empty() => Decision::Restore,
            State::Sealed => Decision::Return,
            State::Prepared | State::Confirmed | State::Done | State::Aborted | State::Cold => Decision::Nothing,
        }
    }

    /// Returns true if the old kernel has an attempt left.
    pub(crate) fn has_attempt_left(&self) -> bool {
        self.begun_on.iter().filter(|begun| **begun == self.from).count() < OLD_KERNEL_ATTEMPTS_MAX
    }

    /// Appends a reason for which the switch did not succeed.
    pub(crate) fn add_reason(&mut self, why: &str) {
        match &mut self.why {
            Some(known) if known.contains(why) => {}
            Some(known) => *known = format!("{known}; then: {why}"),
            None => self.why = Some(why.to_owned()),
        }
    }

    /// Returns the result as a sentence for the operator.
    pub fn summary(&self) -> String {
        let Journal { from, to, .. } = self;
        let why = self.why.as_deref().unwrap_or("the reason is unknown");
        let ends_on = self.timings.last().map_or(from, |timing| &timing.kernel);
        match self.state {
            State::Prepared => "no image is sealed: the units run, or start from their files".into(),
            State::Sealed => "the units are in the images: the next boot restores them".into(),
            State::Released => {
                "the units were released and are not confirmed: the next boot starts them from their files".into()
            }
            State::Confirmed => format!("the units run on {ends_on}; their memory is still being fetched"),
            State::Done if ends_on == to => format!("succeeded: the units run on {to}"),
            State::Done => format!("fell back to {from}, where the units continue from their images: {why}"),
            State::Aborted => format!("was aborted, and the units continued: {why}"),
            State::Cold => format!("the units were started from their files: {why}"),
        }
    }

    /// Returns the warnings for the operator before a change of the kernel.
    pub fn warnings(&self) -> Vec<String> {
        let region = self.region.as_ref().map(Region::warning);
        let handover = self.handover.as_ref().map(Handover::warning);
        self.watchdog_warning
            .iter()
            .cloned()
            .chain(region)
            .chain(handover)
            .chain(self.cautions.iter().cloned())
            .collect()
    }

    /// Returns the directory of a unit's image.
    pub fn image(&self, unit: &str) -> PathBuf {
        self.config.images().join(unit)
    }

    /// Removes all images, and the memory that was only for them.
    pub(crate) fn drop_images(&self) -> Result<(), Error> {
        let removed = trusted::Directory::open(&self.config.images()).and_then(trusted::Directory::remove_all);
        self.handover.iter().for_each(Handover::unmount);
        Ok(removed?)
    }

    /// Returns the units whose memory is being fetched from their images.
    pub(crate) fn filling(&self) -> impl Iterator<Item = &str> {
        let whole = |path: PathBuf| path.canonicalize().unwrap_or(path);
        let served: Vec<PathBuf> = stillpoint_kernel_checkpoint::filling_images().into_keys().map(whole).collect();
        let is_served = move |unit: &&Unit| served.contains(&whole(self.image(&unit.name)));
        self.units.iter().filter(is_served).map(|unit| unit.name.as_str())
    }

    /// Returns the limit of time for units that stay to stop, or to start again.
    pub(crate) fn stop_limit(&self) -> Duration {
        Duration::from_secs(self.config.stop_limit_s)
    }

    /// Returns every guarded port, once.
    pub fn ports(&self) -> Vec<u16> {
        let mut ports: Vec<u16> = self.units.iter().flat_map(|unit| unit.ports.iter().copied()).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    /// Records the duration of a phase on this kernel.
    pub fn record_timing(&mut self, phase: &str, duration_us: u64) {
        let (kernel, ended_unix_us) = (host::kernel(), since_1970().as_micros() as u64);
        self.timings.push(Timing { phase: phase.into(), kernel, duration_us, ended_unix_us });
    }

    /// The journal's file.
    fn file(state: &Path) -> JournalFile<Journal> {
        JournalFile::new(state, FILE_NAME, VERSION)
    }

    /// Takes the lock for writing the journal; `None` if another process has it for longer than `limit`.
    pub(crate) fn lock(state: &Path, limit: Duration) -> Result<Option<JournalLock>, Error> {
        Ok(Journal::file(state).lock(LOCK_NAME, limit)?)
    }

    /// Reads the journal, if there is one.
    ///
    /// # Errors
    /// Another user can change it: it names images that are restored, and commands that are run. Or it is damaged, or of
    /// a newer version.
    pub fn read(state: &Path) -> Result<Option<Journal>, Error> {
        Ok(Journal::file(state).read()?)
    }

    /// Writes it as a whole: after a crash there is the old one or the new one.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self) -> Result<(), Error> {
        Ok(Journal::file(&self.config.state).write(self)?)
    }

    /// Sets the next state; it is on disk when this returns.
    ///
    /// # Errors
    /// The file cannot be written to disk.
    pub fn advance(&mut self, state: State) -> Result<(), Error> {
        self.state = state;
        self.write()
    }
}

impl Unit {
    /// Adds the ports that the unit has now; returns true if there are new ones. Earlier ones stay guarded.
    pub(crate) fn add_ports(&mut self, ports: &[u16]) -> bool {
        let before = self.ports.len();
        self.ports.extend(ports);
        self.ports.sort_unstable();
        self.ports.dedup();
        self.ports.len() > before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    impl Journal {
        /// Returns the journal of a switch of no units that has just begun.
        pub(crate) fn plain(from: &str, to: &str) -> Self {
            Journal { v: 1, from: from.into(), to: to.into(), pid_max: 4000, ..Journal::default() }
        }
    }

    impl Unit {
        /// Returns a unit without a port and a command.
        pub(crate) fn plain(name: &str) -> Self {
            Unit { name: name.into(), pid: 1, ports: Vec::new(), health: Vec::new(), directories: Vec::new() }
        }
    }

    fn journal(state: State, begun_on: &[&str]) -> Journal {
        let begun_on = begun_on.iter().map(ToString::to_string).collect();
        Journal { state, begun_on, ..Journal::plain("6.1", "6.12") }
    }

    #[test]
    fn an_image_is_used_while_no_process_of_it_has_run_and_not_for_ever() {
        let decide = |state, begun: &[&str], kernel: &str| journal(state, begun).decide(kernel, "this boot");
        assert_eq!(decide(State::Sealed, &[], "6.12"), Decision::Restore);
        // it panicked, or hung, before anything was begun
        assert_eq!(decide(State::Sealed, &[], "6.1"), Decision::Restore);
        assert_eq!(decide(State::Sealed, &["6.12"], "6.12"), Decision::Return);
        assert_eq!(decide(State::Sealed, &["6.12"], "6.1"), Decision::Restore);
        // power was lost while the old kernel restored, or there was a temporary failure
        assert_eq!(decide(State::Sealed, &["6.12", "6.1"], "6.1"), Decision::Restore);
        assert_eq!(decide(State::Sealed, &["6.1"], "6.1"), Decision::Restore);
        // and then the new kernel started
        assert_eq!(decide(State::Sealed, &["6.1"], "6.12"), Decision::Return);
        for (state, begun, kernel) in [
            (State::Sealed, &["6.12", "6.1", "6.1"][..], "6.1"),
            (State::Sealed, &["6.1", "6.1"], "6.12"),
            (State::Sealed, &[], "5.10"),
            (State::Released, &["6.12"], "6.12"),
            (State::Released, &["6.12"], "6.1"),
        ] {
            assert!(matches!(decide(state, begun, kernel), Decision::Cold(_)), "{state:?} {begun:?} {kernel}");
        }
        for state in [State::Prepared, State::Confirmed, State::Done, State::Aborted, State::Cold] {
            assert_eq!(decide(state, &["6.12"], "6.12"), Decision::Nothing);
        }
    }

    #[test]
    fn in_the_boot_of_the_seal_nothing_is_done_with_images() {
        let sealed = Journal { boot: Some("one".into()), ..journal(State::Sealed, &[]) };
        assert_eq!(sealed.decide("6.1", "one"), Decision::Nothing);
        assert_eq!(sealed.decide("6.1", "two"), Decision::Restore);
        assert_eq!(sealed.decide("6.12", "two"), Decision::Restore);
    }

    #[test]
    fn units_whose_memory_still_comes_are_known_by_its_daemons() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal(State::Confirmed, &[]);
        journal.config.state = dir.path().to_owned();
        journal.units = ["a.service", "b.service"].map(Unit::plain).into();
        let socket = journal.image("b.service").join("lazy-pages.socket");
        // looks like a daemon of its image, until its standard input ends
        let mut daemon = std::process::Command::new("sh");
        daemon
            .args(["-c", "echo; read line; :", "kernel", "kernel", "lazy-pages"])
            .arg(journal.image("b.service"))
            .arg(socket);
        daemon.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut daemon = daemon.spawn().unwrap();
        std::io::Read::read_exact(daemon.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        assert_eq!(journal.filling().collect::<Vec<_>>(), ["b.service"]);
        drop(daemon.stdin.take());
        daemon.wait().unwrap();
        assert_eq!(journal.filling().count(), 0);
    }

    #[test]
    fn ports_that_are_opened_later_are_guarded_and_none_is_forgotten() {
        let mut unit = Unit { ports: vec![6379], ..Unit::plain("redis-server.service") };
        assert!(!unit.add_ports(&[6379]) && !unit.add_ports(&[]));
        assert!(unit.add_ports(&[43_210, 6379]));
        assert_eq!(unit.ports, [6379, 43_210]);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let of_this_process = crate::unit::tcp_ports(std::process::id() as i32).unwrap();
        assert!(of_this_process.contains(&listener.local_addr().unwrap().port()));
    }

    #[test]
    fn each_reason_is_told_once() {
        let mut journal = journal(State::Sealed, &[]);
        for why in ["the new kernel hung", "no room", "no room"] {
            journal.add_reason(why);
        }
        assert_eq!(journal.why.as_deref(), Some("the new kernel hung; then: no room"));
    }

    #[test]
    fn what_became_of_a_switch_is_told_by_where_it_ended() {
        let ended_on = |kernel: &str, state| {
            let timing = Timing { phase: "fill".into(), kernel: kernel.into(), duration_us: 1, ended_unix_us: 1 };
            Journal { timings: vec![timing], ..journal(state, &[]) }.summary()
        };
        assert_eq!(ended_on("6.12", State::Done), "succeeded: the units run on 6.12");
        assert!(ended_on("6.1", State::Done).starts_with("fell back to 6.1"));
        assert!(ended_on("6.1", State::Cold).contains("started from their files"));
    }

    #[test]
    fn what_was_written_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal(State::Prepared, &[]);
        journal.config.state = dir.path().join("state");
        assert_eq!(Journal::read(&journal.config.state).unwrap(), None);
        journal.advance(State::Sealed).unwrap();
        assert_eq!(Journal::read(&journal.config.state).unwrap(), Some(journal.clone()));
        fs::write(journal.config.state.join(FILE_NAME), "{").unwrap();
        assert!(Journal::read(&journal.config.state).is_err());
    }

    /// The journal names images that are restored, and commands that root runs.
    #[test]
    fn a_journal_that_another_user_can_change_is_not_read() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal(State::Sealed, &[]);
        let (state, link) = (dir.path().join("state"), dir.path().join("link"));
        journal.config.state.clone_from(&state);
        journal.write().unwrap();
        symlink("state", &link).unwrap();
        let refused = |at: &Path| match Journal::read(at) {
            Err(error) if error.is_refusal() => error.to_string(),
            read => panic!("{read:?}"),
        };
        assert!(refused(&link).contains("symbolic link"));
        fs::set_permissions(state.join(FILE_NAME), PermissionsExt::from_mode(0o666)).unwrap();
        assert!(refused(&state).contains("others can write to it"));
        fs::set_permissions(&state, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(refused(&state).contains("others can write to it"));
        assert!(journal.write().is_err() && Journal::lock(&state, Duration::ZERO).is_err());
    }
}
