//! Checkpoint of a running process and all below it, into an image.

use crate::check::{GHOST_LIMIT, check};
use crate::criu::{Criu, DUMP_LOG, read_errors};
use crate::journal::Journal;
use crate::page_server::through_page_server;
use crate::precopy::{self, Pass};
use crate::progress::{Observer, Progress, now_ns};
use crate::space::check_space;
use crate::store::{PASS_PREFIX, Store, discard};
use crate::unit_restart::check_unit_restart;
use crate::{Error, MachineKey, guard, host, repair_mode};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use stillpoint_events::EventKind;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::rpc::{Answer, NetworkLock, Options, PageServer, Request, RequestType, Version};
use stillpoint_kernel_foam::{Form, PRESENT};
use stillpoint_operation::{Faults, Operation, Phase, run_blocking};

/// Protection of sockets from the network while no process holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Guard {
    /// Rules of nftables, which criu and stillpoint add at the checkpoint and remove at the restore.
    ///
    /// Until then packets of established connections are dropped.
    Nftables,
    /// No guard: the kernel resets connections of peers that send meanwhile.
    None,
}

impl Guard {
    /// Returns the options that criu gets for a dump as well as for a restore.
    pub(crate) fn criu_options(self, directory: &OwnedFd, log: &str) -> Options {
        let lock = match self {
            Guard::Nftables => NetworkLock::Nftables,
            Guard::None => NetworkLock::Skip,
        };
        Options {
            images_dir_fd: directory.as_raw_fd(),
            tcp_established: Some(true),
            shell_job: Some(true),
            file_locks: Some(true),
            log_level: Some(3),
            log_file: Some(log.into()),
            notify_scripts: Some(true),
            link_remap: Some(true),
            manage_cgroups_mode: Some(0),
            network_lock: Some(lock as i32),
            ..Options::default()
        }
    }
}

/// Options of a checkpoint.
#[derive(Debug, Clone)]
pub struct CheckpointOptions {
    /// The root of the processes.
    pub pid: i32,
    /// Directory of the image; made if it is not there.
    pub image: PathBuf,
    /// The criu that dumps.
    pub criu: Criu,
    /// Let the processes run on; otherwise they end when the image is sealed.
    pub leave_running: bool,
    /// The form of the image's files; detected if not given.
    pub form: Option<Form>,
    /// Protection of the connections from the network.
    pub guard: Guard,
    /// Maximum number of passes while the processes run; the rest is written while they are stopped.
    pub passes: u32,
    /// File of the machine's key, made if it is not there: [`crate::MACHINE_KEY`].
    pub key: PathBuf,
    /// For tests: requested faults.
    pub faults: Faults,
}

/// Result of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Number of processes in the image.
    pub memories: usize,
    /// Number of pages in the image.
    pub pages: u64,
    /// Passes before the processes were stopped.
    pub passes: Vec<Pass>,
    /// Bytes that were written while the processes were stopped.
    pub written: u64,
    /// Bytes of pages that held only zeros, and were not written.
    pub zeros: u64,
    /// Nanoseconds from the request to criu to stop the processes, to the seal. The end of the processes is not
    /// included.
    pub frozen_ns: u64,
}

/// Writes a process, and all below it, into an image.
///
/// The image is sealed while the processes are stopped. Until then every failure lets them run on, and leaves nothing
/// but logs: criu's rules of nftables are also removed if criu could not remove them itself.
///
/// # Errors
/// A check refuses, systemd would restart the program, criu fails or is killed, or the image cannot be written.
pub fn checkpoint(options: &CheckpointOptions, observer: Observer<'_>) -> Result<Checkpoint, Error> {
    if !options.leave_running {
        check_unit_restart(options.pid)?;
    }
    checkpoint_with_hook(options, &|_| Ok(()), observer)
}

/// Moments of a checkpoint at which the caller can act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Before the processes are frozen, and after all passes.
    Freezing,
    /// After the image has been sealed, while the processes are still stopped.
    Sealed,
}

/// Writes a process, and all below it, into an image like [`checkpoint`], and calls `at` at its moments. If `at` fails
/// the processes run on, and there is no image.
///
/// # Errors
/// As for [`checkpoint`], and the error that `at` returns.
pub fn checkpoint_with_hook(
    options: &CheckpointOptions,
    at: &dyn Fn(Moment) -> Result<(), Error>,
    observer: Observer<'_>,
) -> Result<Checkpoint, Error> {
    let mut run = Run {
        options,
        at,
        version: options.criu.version()?,
        progress: Progress::new(Run::NAME, &options.image, Some(options.pid), observer),
        key: None,
        has_image: false,
        store: None,
        parent: None,
        frozen_since_ns: 0,
        done: Checkpoint::default(),
    };
    let done = run_blocking(&mut run, &phases()).map_err(|failed| failed.error);
    run.progress.finish(&done);
    if done.is_ok() && options.leave_running {
        crate::stale_mark::mark(&options.image, "the program continued after the checkpoint")?;
    }
    done.map(|()| run.done)
}

/// The order of a checkpoint.
fn phases<'r>() -> [Phase<Run<'r>>; 3] {
    [
        // it makes the directory of the image, too
        Phase::new("check", prepare, clean_up),
        Phase::rounds(PASS_PREFIX, |run| precopy::is_due(&run.done.passes, run.options.passes), make_pass),
        // it lets the processes run on if it fails, and ends them otherwise
        Phase::point_of_no_return("dump", dump),
    ]
}

/// The end of a dump, while criu waits and the processes are stopped. If a phase fails, the dump fails.
fn sealing_phases<'r>(options: &CheckpointOptions) -> Vec<Phase<Run<'r>>> {
    let mut phases = vec![Phase::without_inverse("seal", seal)];
    if options.guard == Guard::Nftables && !options.leave_running {
        phases.push(Phase::without_inverse("guard", |run: &mut Run<'r>| guard::start_owner(&run.options.image)));
    }
    phases
}

/// An active checkpoint.
struct Run<'r> {
    options: &'r CheckpointOptions,
    /// Is called at each moment.
    at: &'r dyn Fn(Moment) -> Result<(), Error>,
    version: Version,
    progress: Progress<'r>,
    key: Option<MachineKey>,
    /// True if the directory of the image is that of this checkpoint.
    has_image: bool,
    /// The unfinished image, unless a pass or the dump has it.
    store: Option<Store>,
    /// Directory of criu's last pass, if criu makes them.
    parent: Option<PathBuf>,
    /// Time at which criu was told to stop the processes, by `CLOCK_MONOTONIC`.
    frozen_since_ns: u64,
    /// The result, as far as it is known.
    done: Checkpoint,
}

impl Operation for Run<'_> {
    type Error = Error;
    const NAME: &'static str = "checkpoint";

    fn faults(&self) -> &Faults {
        &self.options.faults
    }

    fn report(&mut self, event: EventKind) {
        self.progress.report(event);
    }

    fn permit(&mut self, phase: &'static str) -> Result<(), Error> {
        if phase == "dump" { (self.at)(Moment::Freezing) } else { Ok(()) }
    }

    fn ended(&mut self, phase: &str, duration_ns: u64, error: Option<&Error>) {
        self.progress.ended(phase, duration_ns, error);
    }
}

impl Run<'_> {
    /// Takes the unfinished image.
    fn take_store(&mut self) -> Result<Store, Error> {
        self.store.take().ok_or_else(|| Error::Unsealed(self.options.image.clone()))
    }
}

/// Finds obstacles, and makes an empty image.
fn prepare(run: &mut Run<'_>) -> Result<(), Error> {
    let options = run.options;
    check(options.pid, &options.criu)?.require_no_refusal()?;
    check_space([options.pid], &options.image)?;
    run.key = Some(MachineKey::read_or_make(&options.key)?);
    run.store = Some(Store::create(&options.image, options.form)?);
    run.has_image = true;
    Ok(())
}

/// Removes what a failed checkpoint has left, and logs what criu should have removed.
fn clean_up(run: &mut Run<'_>) -> Result<(), Error> {
    if !run.has_image {
        return Ok(());
    }
    let options = run.options;
    let (dir, journal) = (options.image.as_path(), Journal::of(&options.image).with_pid(Some(options.pid)));
    let connections = repair_mode::leave_repair_mode_below(options.pid);
    if connections > 0 {
        journal.note(
            "checkpoint",
            &format!("took {connections} connections out of repair mode, in which criu had left them"),
            None,
            None,
        );
    }
    match guard::lift(dir) {
        Ok(Some(table)) => {
            journal.note("checkpoint", &format!("removed table {table} of nftables, which criu had left"), None, None);
        }
        Ok(None) => {}
        Err(error) => journal.note("checkpoint", "remove criu's rules of nftables", None, Some(&error)),
    }
    discard(dir);
    Ok(())
}

fn make_pass(run: &mut Run<'_>) -> Result<(), Error> {
    let (store, number) = (run.take_store()?, run.done.passes.len() + 1);
    let (store, pass) = precopy::make_pass(run.options, number, &mut run.parent, store)?;
    run.store = Some(store);
    run.done.passes.push(pass);
    Ok(())
}

/// Makes the last pass: the image is sealed when criu has dumped everything and the processes are still stopped.
fn dump(run: &mut Run<'_>) -> Result<(), Error> {
    let (options, store) = (run.options, run.take_store()?);
    let directory = Directory::open(&options.image)?.opened()?;
    let parent = run.parent.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let request = |pages| Request::new(RequestType::Dump, Some(dump_options(options, &directory, pages, parent)));
    (run.done.written, run.done.zeros) = store.written();
    run.frozen_since_ns = now_ns();
    let served = through_page_server(options.pid, &options.criu, store, request, |received, store| {
        received?;
        run.store = Some(store);
        run_blocking(run, &sealing_phases(options)).map_err(|failed| failed.error)?;
        (run.at)(Moment::Sealed)
    })?;
    // a criu that was killed after it had begun to end them: the image is valid for all of them
    let ends = !options.leave_running && !served.lost_pids.is_empty();
    match (served.answer?, served.at_end_result) {
        (answer, Some(Ok(()))) if ends || matches!(answer, Answer::Done { .. }) => {
            if ends && served.processes.kill_remaining() {
                crate::stale_mark::mark(
                    &options.image,
                    "criu was killed while it terminated the program, and some processes continued",
                )?;
            }
            Ok(())
        }
        (_, Some(Err(error))) => Err(error),
        _ if !served.lost_pids.is_empty() => Err(Error::ProcessesLost(served.lost_pids)),
        (answer, _) => {
            let mut messages = read_errors(&options.image, DUMP_LOG);
            if let (true, Answer::Failed { message: Some(message), .. }) = (messages.is_empty(), answer) {
                messages.push(message);
            }
            if let (true, Some((Err(error), _))) = (messages.is_empty(), served.unserved) {
                return Err(error);
            }
            Err(Error::Failed { what: "dump the processes", messages })
        }
    }
}

/// Seals the image.
fn seal(run: &mut Run<'_>) -> Result<(), Error> {
    let (options, store) = (run.options, run.take_store()?);
    let key = run.key.as_ref().ok_or_else(|| Error::Unsealed(options.image.clone()))?;
    let (written, zeros) = store.written();
    let index = store.seal(host::origin(options.pid, run.version), key)?;
    let done = &mut run.done;
    done.frozen_ns = now_ns() - run.frozen_since_ns;
    (done.written, done.zeros) = (written - done.written, zeros - done.zeros);
    let extents = index.memories.iter().flat_map(|memory| memory.extents.iter());
    done.pages = extents.filter(|extent| extent.flags & PRESENT != 0).map(|extent| extent.pages).sum();
    done.memories = index.memories.len();
    Ok(())
}

fn dump_options(options: &CheckpointOptions, directory: &OwnedFd, pages: i32, parent: Option<String>) -> Options {
    Options {
        pid: Some(options.pid),
        leave_running: Some(options.leave_running),
        ps: Some(PageServer { fd: Some(pages) }),
        ghost_limit: Some(GHOST_LIMIT as u32),
        track_mem: parent.is_some().then_some(true),
        parent_img: parent,
        ..options.guard.criu_options(directory, DUMP_LOG)
    }
}
