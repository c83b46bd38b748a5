//! Checkpoint of a running process and all below it, into an image.

use crate::check::check;
use crate::criu::{Criu, read_errors};
use crate::error::ErrorContext;
use crate::journal::Journal;
use crate::page_server::{DumpCounts, serve};
use crate::precopy::{self, Pass};
use crate::process_tree::{ProcessHandles, tree};
use crate::progress::{Observer, Progress, now_ns};
use crate::store::{Store, discard};
use crate::unit_restart::check_unit_restart;
use crate::{Error, MachineKey, guard, host, repair_mode};
use rustix::event::Timespec;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::rpc::{Answer, NetworkLock, Options, PageServer, Request, RequestType, Version};
use stillpoint_kernel_foam::{Form, PRESENT};

/// Log of criu for a dump.
pub(crate) const DUMP_LOG: &str = "dump.log";
/// Limit in bytes up to which a deleted file that is open is kept in the image.
pub(crate) const GHOST_LIMIT: u64 = 64 << 20;
/// Time within which a process hits a breakpoint of criu after criu was killed at a bad moment.
const BREAKPOINT_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Protection of sockets from the network while no process holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// Rules of nftables, criu's and those of a guard owner: packets of established connections are dropped until the restore.
    Nftables,
    /// No protection by this program: without another one, a peer that sends meanwhile is reset.
    None,
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
    /// For tests: fail when everything has been dumped, before the seal.
    pub fail_before_seal: bool,
}

/// Result of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    let progress = Progress::new("checkpoint", Some(options.pid), observer);
    let version = options.criu.version()?;
    let key = progress.phase("check", || {
        check(options.pid, &options.criu)?.require_no_refusal()?;
        check_space([options.pid], &options.image)?;
        MachineKey::read_or_make(&options.key)
    })?;
    let store = Store::create(&options.image, options.form)?;
    progress.journal_in(&options.image);
    let done = precopy::run_passes(options, &progress, store)
        .and_then(|(store, passes, parent)| {
            at(Moment::Freezing)?;
            progress.phase("dump", || dump(options, store, (passes, parent), (version, &key), at, &progress))
        })
        .inspect_err(|_| clean_up(options));
    progress.finish(&done);
    if done.is_ok() && options.leave_running {
        crate::stale_mark::mark(&options.image, "the program continued after the checkpoint")?;
    }
    done
}

/// Removes what a failed checkpoint has left, and logs what criu should have removed.
fn clean_up(options: &CheckpointOptions) {
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
}

/// Refuses images that do not fit on their file system: memory is written as it is, without compression.
pub(crate) fn check_space(pids: impl IntoIterator<Item = i32>, image: &Path) -> Result<(), Error> {
    let nearest = nearest_existing(image);
    let room = rustix::fs::statvfs(nearest).at("examine", nearest)?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    let needed = pids.into_iter().map(memory_bytes).sum::<Result<u64, Error>>()?;
    if needed > free {
        let (needed, free) = (needed >> 20, free >> 20);
        let text = format!("{} has {free} MiB free, the image needs up to {needed}", nearest.display());
        return Err(Error::Refused(vec![text]));
    }
    Ok(())
}

/// Returns the nearest directory that exists.
pub(crate) fn nearest_existing(path: &Path) -> &Path {
    let nearest = path.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    if nearest.as_os_str().is_empty() { Path::new(".") } else { nearest }
}

/// Returns the bytes of memory of a process and all below it.
pub(crate) fn memory_bytes(pid: i32) -> Result<u64, Error> {
    let statuses: Vec<_> = tree(pid)?.iter().filter_map(|process| process.status().ok()).collect();
    let own = |status: &procfs::process::Status| status.rssanon.unwrap_or(0) + status.vmswap.unwrap_or(0);
    // each process counts the same shared memory
    let shared = statuses.iter().filter_map(|status| status.rssshmem).max().unwrap_or(0);
    Ok((statuses.iter().map(own).sum::<u64>() + shared) * 1024)
}

/// Makes the last pass: the image is sealed when criu has dumped everything and the processes are still stopped.
fn dump(
    options: &CheckpointOptions,
    store: Store,
    (passes, parent): (Vec<Pass>, Option<PathBuf>),
    (version, key): (Version, &MachineKey),
    at: &dyn Fn(Moment) -> Result<(), Error>,
    progress: &Progress<'_>,
) -> Result<Checkpoint, Error> {
    let directory = Directory::open(&options.image)?.opened()?;
    let before = store.written();
    let begun = now_ns();
    let request = |pages| {
        let parent = parent.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        Request::new(RequestType::Dump, Some(dump_options(options, &directory, pages, parent)))
    };
    let served = through_page_server(options, store, request, |received, store| {
        received?;
        if options.fail_before_seal {
            return Err(Error::Failed { what: "seal the image", messages: vec!["a test made it fail".into()] });
        }
        let (written, zeros) = store.written();
        let index = progress.phase("seal", || store.seal(host::origin(options.pid, version), key))?;
        let frozen_ns = now_ns() - begun;
        if options.guard == Guard::Nftables && !options.leave_running {
            progress.phase("guard", || guard::start_owner(&options.image))?;
        }
        at(Moment::Sealed)?;
        Ok((index, written - before.0, zeros - before.1, frozen_ns))
    })?;
    // a criu that was killed after it had begun to end them: the image is valid for all of them
    let ends = !options.leave_running && !served.lost_pids.is_empty();
    match (served.answer?, served.at_end_result) {
        (answer, Some(Ok((index, written, zeros, frozen_ns)))) if ends || matches!(answer, Answer::Done { .. }) => {
            if ends && served.processes.kill_remaining() {
                crate::stale_mark::mark(
                    &options.image,
                    "criu was killed while it terminated the program, and some processes continued",
                )?;
            }
            let extents = index.memories.iter().flat_map(|memory| memory.extents.iter());
            let pages = extents.filter(|extent| extent.flags & PRESENT != 0).map(|extent| extent.pages).sum();
            Ok(Checkpoint { memories: index.memories.len(), pages, passes, written, zeros, frozen_ns })
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

/// Result of a request whose pages went into a store.
pub(crate) struct PageServerOutcome<T> {
    /// criu's answer.
    pub(crate) answer: Result<Answer, Error>,
    /// Result of `at_end` on the store while the processes were stopped, if criu came so far.
    pub(crate) at_end_result: Option<Result<T, Error>>,
    /// The store, if `at_end` did not run.
    pub(crate) unserved: Option<(Result<DumpCounts, Error>, Store)>,
    /// The processes, and those of them that ended with a criu that was killed.
    pub(crate) processes: ProcessHandles,
    pub(crate) lost_pids: Vec<i32>,
}

/// Sends criu a request that sends pages; they go into the store until criu has closed the connection. `at_end` takes
/// the store when everything has been dumped and the processes are still stopped; they run on if that fails.
///
/// They also run on when criu is killed, with one exception: criu makes system calls in a process by writing
/// instructions over the process's own. A process that is in such a call when criu dies hits the breakpoint after it.
pub(crate) fn through_page_server<T>(
    options: &CheckpointOptions,
    mut store: Store,
    request: impl FnOnce(i32) -> Request,
    at_end: impl Fn(Result<DumpCounts, Error>, Store) -> Result<T, Error>,
) -> Result<PageServerOutcome<T>, Error> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .with_action("make a socket for pages")?;
    let mut worker = options.criu.private_worker(&[theirs.as_fd()])?;
    worker.protect_from_oom();
    // while criu starts
    let processes = ProcessHandles::open(options.pid);
    let request = request(theirs.as_raw_fd());
    // criu alone holds its end now: when criu dies, the page server reads the end of the connection
    drop(theirs);
    let mut server = Some(std::thread::spawn(move || -> (Result<DumpCounts, Error>, Store) {
        let received = serve(&mut UnixStream::from(ours), &mut store);
        (received, store)
    }));
    let panicked = || Error::Daemon("the page server panicked".into());
    let mut at_end_result = None;
    let answer = worker.request(&request, |step, _| {
        if step != "post-dump" {
            return true;
        }
        at_end_result = server.take().map(|server| {
            let (received, store) = server.join().map_err(|_| panicked())?;
            at_end(received, store)
        });
        matches!(at_end_result, Some(Ok(_)))
    });
    let died = worker.has_died();
    match answer {
        Ok(_) => worker.end(),
        Err(_) => worker.kill(),
    }
    let lost_pids = if died { processes.ended(BREAKPOINT_TIMEOUT) } else { Vec::new() };
    let unserved = server.take().and_then(|server| server.join().ok());
    Ok(PageServerOutcome { answer, at_end_result, unserved, processes, lost_pids })
}

fn dump_options(options: &CheckpointOptions, directory: &OwnedFd, pages: i32, parent: Option<String>) -> Options {
    let lock = match options.guard {
        Guard::Nftables => NetworkLock::Nftables,
        Guard::None => NetworkLock::Skip,
    };
    Options {
        images_dir_fd: directory.as_raw_fd(),
        pid: Some(options.pid),
        leave_running: Some(options.leave_running),
        tcp_established: Some(true),
        shell_job: Some(true),
        file_locks: Some(true),
        log_level: Some(3),
        log_file: Some(DUMP_LOG.into()),
        ps: Some(PageServer { fd: Some(pages) }),
        notify_scripts: Some(true),
        link_remap: Some(true),
        manage_cgroups_mode: Some(0),
        ghost_limit: Some(GHOST_LIMIT as u32),
        network_lock: Some(lock as i32),
        track_mem: parent.is_some().then_some(true),
        parent_img: parent,
        ..Options::default()
    }
}
