//! View of a process through `/proc`: nothing here stops or changes it.

use crate::gadgets::{Gadgets, Landmarks};
use crate::maps;
use crate::module;
use crate::priority::yield_if_idle_class;
use crate::status::{Stat, Threads};
use crate::{Error, Libc, Mapping, Memory, Module, Pid, Status, ThreadActivity, ThreadInfo, Tid, sys};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use stillpoint_host::kernel_files;

/// Number of times the list of threads is read if no thread is held: a thread that ends may cut it short (see [`Threads`]).
const LISTINGS_MAX: u32 = 16;

/// A running x86-64 process that may be traced. Holds a pidfd and `/proc/PID`, so that a reused number is detected.
#[derive(Debug, Clone)]
pub struct Process {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    pid: Pid,
    pidfd: OwnedFd,
    /// Kept open: after the process has ended, every access below it fails, even if the number is reused.
    dir: File,
    /// Directory of the files about the memory: `.`, or below `task` if the leader has ended and other threads continue.
    view: PathBuf,
    memory: Memory,
    kernel: (u32, u32),
    landmarks: OnceLock<Landmarks>,
}

impl Process {
    /// Opens a process, or refuses it with the reason: ended, zombie, number of a thread, kernel thread, 32-bit, static, already traced,
    /// the tool itself, no permission.
    ///
    /// # Errors
    /// One of these reasons, each a variant of [`Error`]; or a file below `/proc` cannot be read.
    pub fn open(pid: Pid) -> Result<Process, Error> {
        Process::open_as(pid, false)
    }

    /// Opens a process only to inspect it: as [`Process::open`], but another process may trace it.
    ///
    /// # Errors
    /// As [`Process::open`], except [`Error::AlreadyTraced`].
    pub fn watch(pid: Pid) -> Result<Process, Error> {
        Process::open_as(pid, true)
    }

    fn open_as(pid: Pid, may_be_traced: bool) -> Result<Process, Error> {
        if pid.0 <= 0 {
            return Err(Error::Gone(pid));
        }
        if pid.0 as u32 == std::process::id() {
            return Err(Error::Own(pid));
        }
        let dir = kernel_files::open(format!("/proc/{pid}")).map_err(|_| Error::Gone(pid))?;
        let base = below(&dir);
        let text = kernel_files::text(base.join("status")).map_err(|_| Error::Gone(pid))?;
        let status = Status::parse(&text).ok_or_else(|| malformed(pid, "status", "a field is missing"))?;
        if status.tgid != pid {
            return Err(Error::NotAProcess { tid: Tid(pid.0), pid: status.tgid });
        }
        let text = kernel_files::text(base.join("stat")).map_err(|_| Error::Gone(pid))?;
        let stat = Stat::parse(&text).ok_or_else(|| malformed(pid, "stat", "a field is missing"))?;
        if stat.kernel_thread() {
            return Err(Error::KernelThread(pid));
        }
        let view = match stat.state {
            'Z' | 'X' => living_thread(&base).ok_or(Error::Zombie(pid))?,
            _ => PathBuf::from("."),
        };
        let pidfd = sys::pidfd_open(pid.0).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOSYS) => Error::Unsupported("pidfd_open"),
            _ => Error::Gone(pid),
        })?;
        if status.tracer.0 != 0 && !may_be_traced {
            let name = kernel_files::text(format!("/proc/{}/comm", status.tracer)).unwrap_or_default();
            return Err(Error::AlreadyTraced { pid, tracer: status.tracer, name: name.trim_end().to_owned() });
        }
        let memory = kernel_files::open_to_change(base.join(&view).join("mem"))
            .map_err(|error| denied_or_gone(pid, &status, error))?;
        let process = Process {
            inner: Arc::new(Inner {
                pid,
                pidfd,
                memory: Memory::new(pid, memory),
                kernel: kernel_version(),
                dir,
                view,
                landmarks: OnceLock::new(),
            }),
        };
        match process.check_program(&status) {
            Err(_) if !process.is_alive() => Err(Error::Gone(pid)),
            checked => checked.map(|()| process),
        }
    }

    fn check_program(&self, status: &Status) -> Result<(), Error> {
        let pid = self.pid();
        let exe = self.open_exe().map_err(|error| match error {
            Error::Os { source, .. } => denied_or_gone(pid, status, source),
            other => other,
        })?;
        let mut head = [0; 64];
        let head_len = exe.read_at(&mut head, 0).unwrap_or(0);
        match module::classify(&head[..head_len]) {
            module::Class::X86_64 => {}
            module::Class::Other(what) => return Err(Error::NotX86_64 { pid, what }),
        }
        if !module::has_interpreter(&exe, &head) && self.libc()? == Libc::Unknown {
            return Err(Error::Static(pid));
        }
        Ok(())
    }

    /// Returns the number of the process.
    pub fn pid(&self) -> Pid {
        self.inner.pid
    }

    /// Returns true if it has not ended (a zombie has), and still runs the program that it ran when it was opened.
    pub fn is_alive(&self) -> bool {
        !sys::has_ended(&self.inner.pidfd) && !self.inner.memory.is_gone()
    }

    /// Returns the memory of the process.
    pub fn memory(&self) -> &Memory {
        &self.inner.memory
    }

    /// Returns all threads, including kernel workers, which are marked, in the kernel's order (oldest first). If threads of the process end
    /// continuously, some may be missing.
    ///
    /// # Errors
    /// [`Error::Gone`] if there is no thread; [`Error::Malformed`] if the kernel shows one in an unknown form.
    pub fn threads(&self) -> Result<Vec<ThreadInfo>, Error> {
        let threads = self.threads_besides(|_| false)?;
        if threads.is_empty() { Err(Error::Gone(self.pid())) } else { Ok(threads) }
    }

    /// Returns [`Process::threads`] without those that are known already, for which nothing is read.
    ///
    /// # Errors
    /// As [`Process::threads`].
    pub fn threads_besides(&self, known: impl Fn(Tid) -> bool) -> Result<Vec<ThreadInfo>, Error> {
        let mut last = Vec::new();
        for _ in 0..LISTINGS_MAX {
            let found = self.threads_but(|tid| known(Tid(tid)))?;
            last = found.threads;
            if found.all {
                break;
            }
        }
        Ok(last)
    }

    /// Returns the number of threads by the kernel's count, including kernel workers and threads that have ended but were not waited for.
    pub(crate) fn thread_count(&self) -> Option<u64> {
        let mut buf = [0; 1024];
        Some(Stat::parse(read_small(&self.path("stat"), &mut buf)?)?.threads)
    }

    /// Returns the threads that are not known already; nothing is read for a known thread.
    pub(crate) fn threads_but(&self, known: impl Fn(i32) -> bool) -> Result<Threads, Error> {
        let mut found = Threads { threads: Vec::new(), all: true };
        for tid in self.tids()?.into_iter().filter(|&tid| !known(tid)) {
            match self.thread_info(Tid(tid))? {
                Some(info) if info.state != 'X' => found.threads.push(info),
                _ => found.all = false,
            }
        }
        Ok(found)
    }

    /// Returns the numbers of the threads, at least one.
    fn tids(&self) -> Result<Vec<i32>, Error> {
        let names = kernel_files::names(self.path("task"));
        let tids: Vec<i32> = names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect();
        if tids.is_empty() { Err(Error::Gone(self.pid())) } else { Ok(tids) }
    }

    /// Returns one thread, `None` if it has ended meanwhile.
    pub(crate) fn thread_info(&self, tid: Tid) -> Result<Option<ThreadInfo>, Error> {
        let mut buf = [0; 1024];
        let Some(text) = self.read_task(tid, "stat", &mut buf) else { return Ok(None) };
        let stat = Stat::parse(text).ok_or_else(|| malformed(self.pid(), "stat", "a field is missing"))?;
        let kernel_worker = stat.kernel_worker(self.inner.kernel);
        Ok(Some(ThreadInfo { tid, kernel_worker, state: stat.state, cpu_ticks: stat.cpu_ticks }))
    }

    /// Returns all mappings, ascending by address.
    ///
    /// # Errors
    /// [`Error::Gone`], or the list cannot be read or understood.
    pub fn mappings(&self) -> Result<Vec<Mapping>, Error> {
        let bytes = read_at_once(&self.memory_path("maps")).map_err(|error| self.os("reading maps", error))?;
        let text = String::from_utf8_lossy(&bytes);
        maps::parse(&text).map_err(|what| malformed(self.pid(), "maps", &what))
    }

    /// Returns all mapped ELF files, the executable first, including the vdso; their properties are read from the mapped memory.
    ///
    /// # Errors
    /// As [`Process::mappings`].
    pub fn modules(&self) -> Result<Vec<Module>, Error> {
        Ok(self.modules_among(&self.mappings()?))
    }

    /// Returns [`Process::modules`] among mappings that are known already.
    pub fn modules_among(&self, mappings: &[Mapping]) -> Vec<Module> {
        let exe = kernel_files::metadata(self.memory_path("exe")).map(|m| m.ino()).unwrap_or(0);
        let entry = self.auxiliary(libc::AT_ENTRY);
        module::find(mappings, self.memory(), exe, entry)
    }

    /// Returns one value of the auxiliary vector.
    fn auxiliary(&self, key: u64) -> Option<u64> {
        let bytes = kernel_files::bytes(self.memory_path("auxv")).ok()?;
        let word = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes"));
        bytes.chunks_exact(16).find(|pair| word(&pair[..8]) == key).map(|pair| word(&pair[8..]))
    }

    /// Opens the executable, even if it was deleted or replaced on disk.
    ///
    /// # Errors
    /// [`Error::Gone`], or the kernel denies the file.
    pub fn open_exe(&self) -> Result<File, Error> {
        kernel_files::open(self.memory_path("exe")).map_err(|error| self.os("opening exe", error))
    }

    /// Opens the file of a mapping, even if it was deleted or replaced on disk: through `map_files`, otherwise by path below the process's
    /// root, if device and inode match.
    ///
    /// # Errors
    /// [`Error::MappedFile`] if there is no file, or it can be opened in neither way.
    pub fn open_mapping(&self, mapping: &Mapping) -> Result<File, Error> {
        let path = mapping.path.clone().unwrap_or_default();
        let refuse = |why: String| Error::MappedFile { pid: self.pid(), path: path.clone(), why };
        if mapping.inode == 0 {
            return Err(refuse("there is no file behind the mapping".to_owned()));
        }
        let link = self.path(&format!("map_files/{:x}-{:x}", mapping.start.0, mapping.end.0));
        let first = match kernel_files::open(link) {
            Ok(file) => return Ok(file),
            Err(error) => error,
        };
        // Without CAP_CHECKPOINT_RESTORE the link cannot be followed; the path can, in the process's own root.
        let is_it = |found: &std::fs::Metadata| {
            let device = (libc::major(found.dev()), libc::minor(found.dev()));
            (found.ino(), device) == (mapping.inode, mapping.device)
        };
        kernel_files::open_expected(self.memory_path("root").join(path.trim_start_matches('/')), is_it)
            .map_err(|error| refuse(format!("{first}; by path: {error}")))
    }

    /// Finds the mapped C library.
    ///
    /// # Errors
    /// As [`Process::mappings`].
    pub fn libc(&self) -> Result<Libc, Error> {
        Ok(self.libc_among(&self.mappings()?))
    }

    /// Returns [`Process::libc`] among mappings that are known already.
    pub fn libc_among(&self, mappings: &[Mapping]) -> Libc {
        module::libc_kind(mappings, self.memory())
    }

    /// Returns true if a shadow stack is active in any thread (`x86_Thread_features` in `/proc`).
    ///
    /// # Errors
    /// [`Error::Gone`], or a thread's `status` cannot be understood.
    pub fn shadow_stack(&self) -> Result<bool, Error> {
        for tid in self.tids()? {
            match self.thread_status(Tid(tid)) {
                Ok(status) => match status.shadow_stack {
                    // the kernel does not support shadow stacks
                    None => return Ok(false),
                    Some(true) => return Ok(true),
                    Some(false) => {}
                },
                Err(error) if error.gone() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Reads the fields of `/proc/PID/status`.
    ///
    /// # Errors
    /// [`Error::Gone`], or a field is missing ([`Error::Malformed`]).
    pub fn status(&self) -> Result<Status, Error> {
        let text = kernel_files::text(self.path("status")).map_err(|_| Error::Gone(self.pid()))?;
        Status::parse(&text).ok_or_else(|| malformed(self.pid(), "status", "a field is missing"))
    }

    /// Reads the fields of a thread's `status`.
    ///
    /// # Errors
    /// [`Error::ThreadGone`], or a field is missing ([`Error::Malformed`]).
    pub fn thread_status(&self, tid: Tid) -> Result<Status, Error> {
        let mut buf = [0; 4096];
        let text = self.read_task(tid, "status", &mut buf).ok_or(Error::ThreadGone(tid))?;
        Status::parse(text).ok_or_else(|| malformed(self.pid(), "status", "a field is missing"))
    }

    /// Returns the location of a thread and the number of its sleeps, without stopping it.
    ///
    /// # Errors
    /// [`Error::ThreadGone`], or a field is missing ([`Error::Malformed`]).
    pub fn activity(&self, tid: Tid) -> Result<ThreadActivity, Error> {
        // The count is read first: a thread that sleeps afterwards may have slept once more, never once less.
        let switches = self.voluntary_switches(tid)?;
        self.place(tid, switches)
    }

    /// Returns the system call in which a thread sleeps.
    pub(crate) fn sleeps_in(&self, tid: Tid) -> Option<u64> {
        self.place(tid, 0).ok()?.waits_in.map(|(nr, _)| nr)
    }

    fn place(&self, tid: Tid, switches: u64) -> Result<ThreadActivity, Error> {
        let mut buf = [0; 256];
        let text = self.read_task(tid, "syscall", &mut buf).ok_or(Error::ThreadGone(tid))?;
        Ok(ThreadActivity::parse(text, switches))
    }

    /// Returns the number of times that a thread went to sleep voluntarily.
    pub(crate) fn voluntary_switches(&self, tid: Tid) -> Result<u64, Error> {
        let mut buf = [0; 4096];
        let text = self.read_task(tid, "status", &mut buf).ok_or(Error::ThreadGone(tid))?;
        const FIELD: &str = "\nvoluntary_ctxt_switches:";
        let at = text.rfind(FIELD).ok_or_else(|| malformed(self.pid(), "status", "no voluntary_ctxt_switches"))?;
        let number = text[at + FIELD.len()..].split_ascii_whitespace().next().and_then(|n| n.parse().ok());
        number.ok_or_else(|| malformed(self.pid(), "status", "voluntary_ctxt_switches is no number"))
    }

    /// Returns true if another process shares this one's memory (`CLONE_VM`: children of vfork and posix_spawn before exec).
    ///
    /// # Errors
    /// [`Error::Gone`] for the one of the two that has ended; [`Error::Unsupported`] if the kernel lacks `kcmp`.
    pub fn shares_memory(&self, other: Pid) -> Result<bool, Error> {
        sys::same_memory(self.pid().0, other.0).map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => Error::Gone(if self.is_alive() { other } else { self.pid() }),
            Some(libc::ENOSYS) => Error::Unsupported("kcmp"),
            _ => Error::Os { call: "kcmp", id: other.0, source: error },
        })
    }

    /// Returns all other processes that share this one's memory.
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Unsupported`] if the kernel lacks `kcmp`; `/proc` cannot be read.
    pub fn memory_sharers(&self) -> Result<Vec<Pid>, Error> {
        let mut sharers = Vec::new();
        for name in kernel_files::list("/proc").map_err(|error| self.os("reading /proc", error))?.flatten() {
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            if pid == self.pid().0 {
                continue;
            }
            match self.shares_memory(Pid(pid)) {
                Ok(true) => sharers.push(Pid(pid)),
                Ok(false) | Err(Error::Gone(_) | Error::Os { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if self.is_alive() { Ok(sharers) } else { Err(Error::Gone(self.pid())) }
    }

    /// Finds the instructions that remote calls need in the target's text, once. Call it before the process is traced, because it takes
    /// long. Otherwise that is done when a carrier is first needed.
    ///
    /// # Errors
    /// [`Error::NoGadget`] if the text lacks one of them, or the mappings cannot be read.
    pub fn prepare_remote(&self) -> Result<(), Error> {
        self.find_gadgets().map(drop)
    }

    /// Returns the addresses of the C library's signal returns; a signal frame begins with one of them.
    ///
    /// # Errors
    /// As [`Process::mappings`].
    pub fn signal_returns(&self) -> Result<&[u64], Error> {
        Ok(&self.landmarks()?.signal_returns)
    }

    pub(crate) fn find_gadgets(&self) -> Result<Gadgets, Error> {
        self.landmarks()?.gadgets(self.pid())
    }

    /// Finds them once, because the target's text is large.
    fn landmarks(&self) -> Result<&Landmarks, Error> {
        if let Some(landmarks) = self.inner.landmarks.get() {
            return Ok(landmarks);
        }
        let found = Landmarks::find(self)?;
        Ok(self.inner.landmarks.get_or_init(|| found))
    }

    /// Returns a path below `/proc/PID`, through the open directory.
    fn path(&self, name: &str) -> PathBuf {
        below(&self.inner.dir).join(name)
    }

    /// Returns a path that the leader loses when it ends.
    fn memory_path(&self, name: &str) -> PathBuf {
        below(&self.inner.dir).join(&self.inner.view).join(name)
    }

    /// Reads a small file of a thread into a buffer on the stack; `None` if the thread has ended.
    fn read_task<'b>(&self, tid: Tid, name: &str, buf: &'b mut [u8]) -> Option<&'b str> {
        read_small(&self.path(&format!("task/{tid}/{name}")), buf)
    }

    fn os(&self, call: &'static str, source: io::Error) -> Error {
        match source.raw_os_error() {
            Some(libc::ESRCH | libc::ENOENT) => Error::Gone(self.pid()),
            _ => Error::Os { call, id: self.pid().0, source },
        }
    }
}

/// Reads such a file into a buffer on the stack; `None` if it is gone.
fn read_small<'b>(path: &Path, buf: &'b mut [u8]) -> Option<&'b str> {
    yield_if_idle_class();
    let mut file = kernel_files::open(path).ok()?;
    // The kernel returns such a file in one piece: the first read has all of it.
    let len = loop {
        match file.read(buf) {
            Ok(len) => break len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    };
    // A name that is not UTF-8 is at the beginning of the file; nothing after it can be broken.
    match std::str::from_utf8(&buf[..len]) {
        Ok(_) => {}
        Err(_) => buf[..len].iter_mut().filter(|b| !b.is_ascii()).for_each(|b| *b = b'?'),
    }
    std::str::from_utf8(&buf[..len]).ok()
}

/// Reads a file with a large first read: `fs::read` begins with a few bytes, and the kernel generates its text again for every call.
fn read_at_once(path: &Path) -> io::Result<Vec<u8>> {
    yield_if_idle_class();
    let mut bytes = Vec::with_capacity(64 << 10);
    kernel_files::open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn below(dir: &File) -> PathBuf {
    Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string())
}

/// Returns a thread of a process whose leader has ended.
fn living_thread(base: &Path) -> Option<PathBuf> {
    let lives = |task: &PathBuf| {
        let text = kernel_files::text(base.join(task).join("stat")).unwrap_or_default();
        Stat::parse(&text).is_some_and(|stat| !matches!(stat.state, 'Z' | 'X'))
    };
    (0..LISTINGS_MAX).find_map(|_| {
        kernel_files::names(base.join("task")).into_iter().map(|task| Path::new("task").join(task)).find(lives)
    })
}

fn malformed(pid: Pid, file: &str, what: &str) -> Error {
    Error::Malformed { path: format!("/proc/{pid}/{file}"), what: what.to_owned() }
}

fn denied_or_gone(pid: Pid, status: &Status, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => Error::Permission { pid, hint: permission_hint(status) },
        Some(libc::ENOENT | libc::ESRCH) => Error::Gone(pid),
        _ => Error::Os { call: "opening /proc/PID/mem", id: pid.0, source: error },
    }
}

/// Returns the permission that the caller lacks, as far as it is visible from outside.
pub(crate) fn permission_hint(status: &Status) -> String {
    let scope = kernel_files::text("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let own = kernel_files::metadata("/proc/self").map(|m| m.uid()).unwrap_or(u32::MAX);
    if scope.trim() == "3" {
        return "kernel.yama.ptrace_scope is 3: no process may trace until the next boot".to_owned();
    }
    if own == 0 {
        return "CAP_SYS_PTRACE is missing (in a container: --cap-add SYS_PTRACE), or a security module forbids it"
            .to_owned();
    }
    if status.uids[0] != own {
        return format!("it belongs to user {}; run as root or with CAP_SYS_PTRACE", status.uids[0]);
    }
    if !scope.is_empty() && scope.trim() != "0" {
        return format!("kernel.yama.ptrace_scope is {}; run as root or with CAP_SYS_PTRACE", scope.trim());
    }
    "it has more privileges than the caller or is not dumpable; run as root or with CAP_SYS_PTRACE".to_owned()
}

fn kernel_version() -> (u32, u32) {
    let release = kernel_files::text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}
