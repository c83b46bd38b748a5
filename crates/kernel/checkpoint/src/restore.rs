//! Restore of processes from an image.

use crate::addresses;
use crate::cgroup;
use crate::check::Finding;
use crate::criu::{Criu, LOG_BYTES_MAX, RESTORE_LOG, Worker, read_errors};
use crate::criu_files::{CRIU_FILE_BYTES_MAX, RestoreMode, is_read_by_criu, read_files_image, write_criu_files};
use crate::error::ErrorContext;
use crate::lazy::wait_for;
use crate::process_tree::{ProcessHandles, process_name};
use crate::progress::{Observer, Progress, now_ns};
use crate::retransmission::prompt_both_ends;
use crate::{Error, Image, MachineKey, StaleMark, guard, host, orphans, stale_mark};
use procfs::process::Process;
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_events::EventKind;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::image::{inet_sockets, processes};
use stillpoint_kernel_criu::lazy::SOCKET;
use stillpoint_kernel_criu::page_server::Form;
use stillpoint_kernel_criu::rpc::{Answer, Options, Request, RequestType, Version};
use stillpoint_kernel_foam::{Extent, Recorded};
use stillpoint_operation::{Faults, Operation, Phase, run_blocking};

/// Log of the lazy-pages daemon.
const DAEMON_LOG: &str = "lazy-pages.log";
/// Time within which parents reap processes that a checkpoint has ended.
const REAP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time within which a daemon notices that criu has ended.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Line that the daemon prints when criu can be started.
pub const DAEMON_READY_LINE: &str = "ready";

/// Options of a restore.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// Directory of the image.
    pub image: PathBuf,
    /// The criu that restores.
    pub criu: Criu,
    /// Time at which memory is restored.
    pub restore: RestoreMode,
    /// Compare every page with its checksum before anything runs; otherwise, each when it is fetched.
    pub verify: bool,
    /// Guard that the image was made with; with none, no guard is lifted.
    pub guard: crate::Guard,
    /// Restore it although its processes, and so their files, have run on since.
    pub allow_stale: bool,
    /// File of the machine's key: [`crate::MACHINE_KEY`].
    pub key: PathBuf,
    /// Restore it although this machine did not seal it.
    pub trust_image: bool,
    /// Rate in MiB a second of the lazy-pages daemon's background fetch; 0 is unlimited.
    pub fill_rate: u64,
    /// Limit of the wait for addresses that its sockets are bound to: [`crate::ADDRESS_TIMEOUT`].
    pub address_limit: Duration,
    /// The systemd unit in whose control group this runs: the daemon must not be ended together with it.
    pub unit: Option<String>,
    /// For tests: requested faults.
    pub faults: Faults,
}

/// Result of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestoreOutcome {
    /// The root of the processes.
    pub pid: i32,
    /// Process id of the daemon's keeper, while memory is not all resident.
    pub keeper: Option<u32>,
    /// Nanoseconds from the beginning until the processes run.
    pub duration_ns: u64,
}

impl RestoreOutcome {
    /// Waits until the daemon ends: all memory is resident, or is lost. Then removes the control groups in which it ran
    /// beside its unit.
    ///
    /// # Errors
    /// The daemon cannot be watched.
    pub fn wait_for_daemon(&self, unit: &str) -> Result<(), Error> {
        if let Some(keeper) = self.keeper.and_then(|keeper| Pid::from_raw(keeper as i32)) {
            wait_for(keeper)?;
            cgroup::remove_groups(unit);
        }
        Ok(())
    }
}

/// Finds all obstacles to a restore of an image here and now, and all remarks about it. Nothing is touched.
///
/// # Errors
/// The image or the key of this machine cannot be read, or criu cannot be started.
pub fn check_restore(image: &Image, options: &RestoreOptions) -> Result<Vec<Finding>, Error> {
    let mut findings = find_obstacles(image, options)?;
    let missing = addresses::missing_addresses(image)?;
    if !missing.is_empty() {
        let (missing, limit) = (missing.join(", "), options.address_limit.as_secs());
        findings.push(Finding::warning(format!(
            "{missing} is not an address of this machine now: the restore waits up to {limit} s for it"
        )));
    }
    options.criu.version()?;
    Ok(findings)
}

/// Finds an image that this machine did not seal: its program would run with the rights that the image records.
fn check_seal(image: &Image, options: &RestoreOptions) -> Result<Option<Finding>, Error> {
    let origin = &image.index().origin;
    let is_ours = MachineKey::read(&options.key)?.is_some_and(|key| image.is_sealed_by(&key));
    let text = match (origin.machine == host::machine(), is_ours) {
        (true, true) => return Ok(None),
        (false, _) => format!("the image was made on another machine ({})", origin.machine),
        (true, false) => format!(
            "this machine did not seal the image: it was made or changed elsewhere, or the key in {} has changed since",
            options.key.display()
        ),
    };
    Ok(Some(match options.trust_image {
        true => {
            Finding::warning(format!("{text}; its program runs nevertheless, with the rights that the image records"))
        }
        false => Finding::refusal(None, format!("{text} (--trust-image restores it nevertheless)")),
    }))
}

fn find_obstacles(image: &Image, options: &RestoreOptions) -> Result<Vec<Finding>, Error> {
    let mut findings: Vec<Finding> = check_seal(image, options)?.into_iter().collect();
    if let Some(used) = StaleMark::of(image.dir())?.filter(|_| !options.allow_stale) {
        let text = format!(
            "the image is older than the files of its program: {} (--again restores it nevertheless)",
            used.why
        );
        findings.push(Finding::refusal(None, text));
    }
    let origin = &image.index().origin;
    let mut refuse = |text: String| findings.push(Finding::refusal(None, text));
    // Kernels have names for different features: the lists are comparable only under the same kernel.
    let same_kernel = host::kernel() == origin.kernel;
    let processor = |text: &str| match text.rsplit_once(", features") {
        Some((model, _)) if !same_kernel => model.to_owned(),
        _ => text.to_owned(),
    };
    if processor(&origin.processor) != processor(&host::processor()) {
        refuse(format!("the processor is not that of the image ({})", origin.processor));
    }
    if host::numbers(&host::kernel()) < host::numbers(&origin.kernel) {
        let now = host::kernel();
        refuse(format!("kernel {now} is older than {}, on which the image was made", origin.kernel));
    }
    let deadline = Instant::now() + REAP_TIMEOUT;
    for process in processes(&image.directory().read("pstree.img", CRIU_FILE_BYTES_MAX)?)? {
        for tid in process.threads {
            while has_ended(tid) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            if Path::new(&format!("/proc/{tid}")).exists() {
                refuse(format!("process id {tid} of the image is in use by {}", process_name(tid as i32)));
            }
        }
    }
    let sockets = inet_sockets(&read_files_image(image.directory())?)?;
    for port in sockets.iter().filter(|socket| socket.is_listening()).map(|socket| socket.src_port) {
        if is_port_listening(port) {
            refuse(format!("port {port}, on which a program of the image listens, is in use"));
        }
    }
    Ok(findings)
}

/// Returns true if a process has ended, and its parent has not reaped it.
fn has_ended(pid: u32) -> bool {
    let stat = Process::new(pid.cast_signed()).and_then(|process| process.stat());
    stat.is_ok_and(|stat| stat.state == 'Z')
}

fn is_port_listening(port: u32) -> bool {
    let all = procfs::net::tcp().into_iter().chain(procfs::net::tcp6()).flatten();
    all.into_iter().any(|e| e.state == procfs::net::TcpState::Listen && u32::from(e.local_address.port()) == port)
}

/// Restores the processes of an image. Until they run, every failure leaves the image as it was, and no process; the
/// rules of nftables stay, as the image can be restored again.
///
/// # Errors
/// A check refuses, the image is damaged, an address stays missing, the daemon does not start, or criu fails.
pub fn restore(options: &RestoreOptions, observer: Observer<'_>) -> Result<RestoreOutcome, Error> {
    restore_with_hook(options, &|| Ok(()), observer)
}

/// Like [`restore`], and calls `stopped` when all processes are restored and stopped, and nothing has run yet. If that
/// fails they end, and the image can be restored again.
///
/// # Errors
/// As for [`restore`], and the error that `stopped` returns.
pub fn restore_with_hook(
    options: &RestoreOptions,
    stopped: &dyn Fn() -> Result<(), Error>,
    observer: Observer<'_>,
) -> Result<RestoreOutcome, Error> {
    // criu is read from the disk at the same time as the image
    let worker = options.criu.private_worker(&[]);
    let image = Image::open(&options.image)?;
    let mut run = Run {
        options,
        image,
        stopped,
        progress: Progress::new(Run::NAME, &options.image, None, observer),
        worker: Some(worker?),
        form: Form::Long,
        daemon: None,
        begun_ns: 0,
        done: RestoreOutcome::default(),
    };
    let done = run_blocking(&mut run, &phases(options)).map_err(|failed| failed.error);
    run.progress.finish(&done);
    done.map(|()| run.done)
}

/// The order of a restore.
fn phases<'r>(options: &RestoreOptions) -> Vec<Phase<Run<'r>>> {
    let mut phases = vec![
        // it starts the daemon, too
        Phase::new("check", prepare, end_daemon),
        Phase::without_inverse("verify", verify),
        Phase::without_inverse("prepare", write_files),
        Phase::without_inverse("addresses", wait_for_addresses),
    ];
    if options.restore == RestoreMode::OnDemand {
        phases
            .push(Phase::without_inverse("daemon", |run| run.daemon.as_mut().map_or(Ok(()), Daemon::wait_until_ready)));
    }
    // it ends the processes if it fails, and lets them run otherwise
    phases.push(Phase::point_of_no_return("restore", restore_processes));
    if options.guard == crate::Guard::Nftables {
        phases.push(Phase::without_inverse("wake", wake));
    }
    phases
}

/// An active restore.
struct Run<'r> {
    options: &'r RestoreOptions,
    image: Image,
    /// Is called when all processes are restored and stopped.
    stopped: &'r dyn Fn() -> Result<(), Error>,
    progress: Progress<'r>,
    /// The criu that restores, until it begins.
    worker: Option<Worker>,
    /// Form of the entries that this criu reads; known after the check.
    form: Form,
    daemon: Option<Daemon>,
    /// Time after the verification, by `CLOCK_MONOTONIC`.
    begun_ns: u64,
    /// The result, as far as it is known.
    done: RestoreOutcome,
}

impl Operation for Run<'_> {
    type Error = Error;
    const NAME: &'static str = "restore";

    fn faults(&self) -> &Faults {
        &self.options.faults
    }

    fn report(&mut self, event: EventKind) {
        self.progress.report(event);
    }

    fn ended(&mut self, phase: &str, duration_ns: u64, error: Option<&Error>) {
        self.progress.ended(phase, duration_ns, error);
    }
}

/// Finds obstacles, and starts the daemon.
fn prepare(run: &mut Run<'_>) -> Result<(), Error> {
    let options = run.options;
    let warnings = Finding::require_no_refusal(find_obstacles(&run.image, options)?)?;
    warnings.into_iter().for_each(|found| run.progress.warn(found.text));
    if options.guard == crate::Guard::Nftables {
        guard::inspect_image(&options.image)?.warning.into_iter().for_each(|text| run.progress.warn(text));
    }
    // it opens the image while criu starts
    run.daemon = (options.restore == RestoreMode::OnDemand).then(|| Daemon::start(options)).transpose()?;
    if let Some(worker) = &mut run.worker {
        run.form = form_of(options.criu.version_of(worker)?);
    }
    Ok(())
}

fn end_daemon(run: &mut Run<'_>) -> Result<(), Error> {
    run.daemon.take().into_iter().for_each(Daemon::wait_or_kill);
    Ok(())
}

/// Compares the image with its seal: pages only if they are not compared when they are fetched.
fn verify(run: &mut Run<'_>) -> Result<(), Error> {
    let options = run.options;
    run.image.verify_criu_files()?;
    let at_once =
        |recorded: &Recorded, extent: &Extent| options.verify || is_read_by_criu(recorded, extent, options.restore);
    run.image.verify_selected(at_once).map(|_| ())
}

/// Writes the files that criu reads in the place of pages.
fn write_files(run: &mut Run<'_>) -> Result<(), Error> {
    run.begun_ns = now_ns();
    write_criu_files(&run.image, run.options.restore, run.form)
}

fn wait_for_addresses(run: &mut Run<'_>) -> Result<(), Error> {
    addresses::wait(&run.image, run.options.address_limit, |text| run.progress.warn(text))
}

/// Restores the processes and lets them run. If that fails, none of them is left.
fn restore_processes(run: &mut Run<'_>) -> Result<(), Error> {
    destroy_orphans(run);
    let pid = run_criu(run).inspect_err(|_| {
        kill_unfinished(run.image.index().origin.pid);
        set_subreaper(false);
    })?;
    let keeper = run.daemon.take().map(Daemon::detach);
    run.done = RestoreOutcome { pid, keeper, duration_ns: now_ns() - run.begun_ns };
    Ok(())
}

/// Destroys connections of an earlier restore that are still closing.
fn destroy_orphans(run: &Run<'_>) {
    // only an earlier restore can have left some; the question costs time in which the service stands
    let was_restored = run.image.directory().kind(RESTORE_LOG).is_ok();
    let destroyed = if was_restored { orphans::destroy(run.image.dir()) } else { Ok(0) };
    match destroyed {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "destroyed connections of an earlier restore that were still closing"),
        Err(error) => {
            let error = error.with_causes();
            run.progress.warn(format!("connections of an earlier restore may make this one fail: {error}"));
        }
    }
}

/// Lifts the guard, and informs both ends of the connections. A failure does not affect the processes, which run.
fn wake(run: &mut Run<'_>) -> Result<(), Error> {
    if let Err(error) = guard::lift(run.image.dir()) {
        run.progress.warn(format!("its connections are still guarded: {}", error.with_causes()));
    }
    // a leader lifts another guard later, and wakes the connections then
    let prompted = prompt_both_ends(std::iter::once(run.image.dir()));
    prompted.map_or_else(|error| tracing::warn!("connections wait until their next retry: {error}"), drop);
    Ok(())
}

/// Sets whether this process becomes the parent of processes that criu leaves when it ends before its last report.
/// criu's children are killed with it, except those that it has only just made.
fn set_subreaper(ours: bool) {
    let done = set_child_subreaper(ours.then(getpid));
    done.unwrap_or_else(|error| tracing::warn!("processes of a killed criu may remain: {error}"));
}

/// Ends a half-restored process of a criu that was killed. It is a child of ours, so no other process has that number.
fn kill_unfinished(root: i32) {
    let ours = std::process::id() as i32;
    let is_ours = Process::new(root).and_then(|process| process.stat()).is_ok_and(|stat| stat.ppid == ours);
    if !is_ours {
        return;
    }
    ProcessHandles::open(root).kill_remaining();
    if let Some(root) = Pid::from_raw(root) {
        let _ = waitpid(Some(root), WaitOptions::empty());
    }
}

fn form_of(version: Version) -> Form {
    if (version.major, version.minor) < (4, 2) { Form::Short } else { Form::Long }
}

/// Makes criu restore the processes; returns the root of them, which run.
fn run_criu(run: &mut Run<'_>) -> Result<i32, Error> {
    let (options, image, stopped) = (run.options, &run.image, run.stopped);
    let spent = || Error::Step { what: "restore the processes", why: "criu has been used".into() };
    let (mut worker, mut daemon) = (run.worker.take().ok_or_else(spent)?, run.daemon.as_mut());
    let directory = image.directory().opened()?;
    let lazy_pages = Some(options.restore == RestoreMode::OnDemand);
    let restore_options = Options { lazy_pages, ..options.guard.criu_options(&directory, RESTORE_LOG) };
    let _ = image.directory().remove(RESTORE_LOG);
    let mut refused = None;
    // a daemon that fails kills the processes, and criu does not notice
    let mut failed = false;
    let mut daemon_serves = || {
        failed = daemon.as_mut().is_some_and(|daemon| daemon.has_failed());
        !failed
    };
    set_subreaper(true);
    let answer = worker.request_while(
        &Request::new(RequestType::Restore, Some(restore_options)),
        Some(&mut daemon_serves),
        |step, _| {
            if step == "post-restore" {
                // after the first instruction the files of the processes are newer than the image
                let marked = || stale_mark::mark(image.dir(), "it was restored, and its processes have run");
                refused = stopped().and_then(|()| marked()).err();
            }
            refused.is_none()
        },
    );
    if matches!(answer, Ok(Answer::Done { .. })) {
        set_subreaper(false);
        daemon_serves();
    }
    worker.end();
    match (answer?, refused) {
        _ if failed => Err(Error::Daemon(daemon_error(image.dir()))),
        (_, Some(error)) => Err(error),
        (Answer::Done { restored: Some(pid), .. }, None) => Ok(pid),
        _ => Err(Error::Failed { what: "restore the processes", messages: read_errors(image.dir(), RESTORE_LOG) }),
    }
}

/// The process that serves memory.
struct Daemon {
    child: Child,
    image: PathBuf,
    /// It has sent nothing yet.
    is_starting: bool,
}

impl Daemon {
    fn start(options: &RestoreOptions) -> Result<Self, Error> {
        let log = Directory::open(&options.image)?.append(DAEMON_LOG)?;
        let mut command = Command::new(std::env::current_exe().with_action("find this program")?);
        command.args(["kernel", "lazy-pages", "--fill-rate", &options.fill_rate.to_string()]);
        command.arg(&options.image).arg(options.image.join(SOCKET));
        // the end of this pipe informs the daemon that this process is gone
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        if std::env::var_os("STILLPOINT_LOG").is_none() {
            command.env("STILLPOINT_LOG", "info");
        }
        let child = command.spawn().with_action("start the lazy-pages daemon")?;
        if let Some(Err(error)) = options.unit.as_ref().map(|unit| cgroup::move_beside_unit(unit, child.id())) {
            // the restore continues without a group of its own
            tracing::error!("memory is lost if the unit stops before all of it is resident: {}", error.with_causes());
        }
        Ok(Daemon { child, image: options.image.clone(), is_starting: true })
    }

    /// Waits until criu can be started.
    fn wait_until_ready(&mut self) -> Result<(), Error> {
        let mut line = String::new();
        if let Some(out) = self.child.stdout.take() {
            BufReader::new(out).read_line(&mut line).with_action("receive from the lazy-pages daemon")?;
        }
        if line.trim() == DAEMON_READY_LINE {
            self.is_starting = false;
            return Ok(());
        }
        Err(Error::Daemon(daemon_error(&self.image)))
    }

    /// Returns true if it has aborted. A daemon that was killed has a successor.
    fn has_failed(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.and_then(|status| status.code()).is_some_and(|code| code != 0))
    }

    /// Lets it continue without this process; returns its process number.
    fn detach(self) -> u32 {
        self.child.id()
    }

    /// Ends it after criu has ended. A daemon that criu had connected to notices, kills the processes that it served,
    /// and ends: if it were killed before, its successor could kill what the next restore brings back. A daemon that
    /// criu never connected to would wait for ever.
    fn wait_or_kill(mut self) {
        let begun = Instant::now();
        while !self.is_starting && begun.elapsed() < DAEMON_EXIT_TIMEOUT && !self.image.join(SOCKET).exists() {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the last error in the daemon's log, or its last line.
fn daemon_error(dir: &Path) -> String {
    let messages = Directory::open(dir).and_then(|dir| dir.read(DAEMON_LOG, LOG_BYTES_MAX)).unwrap_or_default();
    let messages = String::from_utf8_lossy(&messages);
    let error = messages.lines().rev().find_map(|line| line.strip_prefix("error: lazy-pages daemon: "));
    error.or(messages.lines().last()).unwrap_or("it reported no reason").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_operation::Undo;

    #[test]
    fn phases_depend_on_options_and_nothing_is_undone_when_the_processes_run() {
        let mut options = RestoreOptions {
            image: "/run/stillpoint/a".into(),
            criu: Criu::new("criu"),
            restore: RestoreMode::OnDemand,
            verify: true,
            guard: crate::Guard::Nftables,
            allow_stale: false,
            key: crate::MACHINE_KEY.into(),
            trust_image: false,
            fill_rate: 0,
            address_limit: crate::ADDRESS_TIMEOUT,
            unit: None,
            faults: Faults::none(),
        };
        let names = |options: &RestoreOptions| phases(options).iter().map(|phase| phase.name).collect::<Vec<_>>();
        assert_eq!(names(&options), ["check", "verify", "prepare", "addresses", "daemon", "restore", "wake"]);
        let is_final = |phase: &Phase<Run<'_>>| matches!(phase.undo, Undo::PointOfNoReturn);
        assert_eq!(phases(&options).iter().position(is_final), Some(5));
        (options.restore, options.guard) = (RestoreMode::Eager, crate::Guard::None);
        assert_eq!(names(&options), ["check", "verify", "prepare", "addresses", "restore"]);
    }
}
