//! Obstacles to a checkpoint of a process, as far as they can be found without touching it.

use crate::criu::Criu;
use crate::process_tree::{describe_process, tree};
use crate::unix_peers::unix_peers;
use crate::volatile::{VolatileObjects, volatile};
use crate::{Error, host, ipc};
use procfs::process::{MMPermissions, MMapPath, Process};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_host::kernel_files;

/// Limit in bytes up to which a deleted file that is open is kept in the image.
pub(crate) const GHOST_LIMIT: u64 = 64 << 20;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Information only.
    Note,
    /// It works, but not as the operator may expect.
    Warning,
    /// It does not work.
    Refusal,
}

/// One obstacle or remark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Severity of the finding.
    pub weight: Severity,
    /// The process that it is about; `None` for the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Description, and the remedy.
    pub text: String,
}

impl Finding {
    /// Returns the warnings and notes among findings.
    ///
    /// # Errors
    /// There are refusals; the error has the texts of all.
    pub fn require_no_refusal(findings: Vec<Finding>) -> Result<Vec<Finding>, Error> {
        let (refused, rest): (Vec<_>, Vec<_>) =
            findings.into_iter().partition(|found| found.weight == Severity::Refusal);
        if refused.is_empty() { Ok(rest) } else { Err(Error::Refused(refused.into_iter().map(|f| f.text).collect())) }
    }

    pub(crate) fn refusal(pid: Option<i32>, text: String) -> Self {
        Finding { weight: Severity::Refusal, pid, text }
    }

    pub(crate) fn warning(text: String) -> Self {
        Finding { weight: Severity::Warning, pid: None, text }
    }
}

/// All findings about a tree of processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The processes, the root first.
    pub pids: Vec<i32>,
    /// Findings in the order of their discovery.
    pub findings: Vec<Finding>,
    /// Objects of the processes that are in memory file systems.
    #[serde(skip)]
    pub volatile: VolatileObjects,
}

impl Report {
    /// Returns an error that names every refusal, if there are any.
    ///
    /// # Errors
    /// There is a refusal among the findings.
    pub fn require_no_refusal(&self) -> Result<(), Error> {
        let refused = self.findings.iter().filter(|found| found.weight == Severity::Refusal);
        let texts: Vec<String> = refused
            .map(|found| match found.pid {
                Some(pid) => format!("{}: {}", describe_process(pid), found.text),
                None => found.text.clone(),
            })
            .collect();
        if texts.is_empty() { Ok(()) } else { Err(Error::Refused(texts)) }
    }
}

/// Examines a process and all below it, criu and the kernel. Nothing is touched.
///
/// # Errors
/// The process does not exist, criu does not run or is too old, or the kernel does not list its sockets.
pub fn check(pid: i32, criu: &Criu) -> Result<Report, Error> {
    let mut inspection = Inspection::begin(pid)?;
    inspection.check_machine(criu)?;
    let processes = std::mem::take(&mut inspection.processes);
    for process in &processes {
        // one that ends meanwhile is not an obstacle
        let _ = inspection.check_process(process);
    }
    inspection.report_connections();
    let volatile = volatile(pid)?;
    for (pid, text) in &volatile.lost {
        inspection.note(*pid, format!("{text}; only a switch of kernels refuses that"));
    }
    Ok(Report { pids: processes.iter().map(|process| process.pid).collect(), findings: inspection.findings, volatile })
}

/// State of the machine while processes are examined.
#[derive(Default)]
struct Inspection {
    processes: Vec<Process>,
    /// Processes outside the tree that have a socket or a pipe open, by inode.
    outside: BTreeMap<u64, i32>,
    /// True if a process serves memory to others.
    any_userfaultfd: bool,
    peers: BTreeMap<u32, u32>,
    ports: BTreeSet<u64>,
    /// The namespace of SysV memory that no other process is in, if they have one.
    ipc: Option<PathBuf>,
    findings: Vec<Finding>,
}

impl Inspection {
    fn begin(pid: i32) -> Result<Self, Error> {
        let processes = tree(pid)?;
        let inside: BTreeSet<i32> = processes.iter().map(|process| process.pid).collect();
        let (mut outside, mut any_userfaultfd) = (BTreeMap::new(), false);
        let mut ipc = ipc::namespace(pid);
        for other in procfs::process::all_processes().into_iter().flatten().flatten() {
            if !inside.contains(&other.pid) {
                ipc = ipc.filter(|ours| ipc::namespace(other.pid).as_ref() != Some(ours));
                for (_, target) in descriptors(other.pid) {
                    any_userfaultfd |= target == "anon_inode:[userfaultfd]";
                    if let Some((_, inode)) = parse_numbered(&target) {
                        outside.insert(inode, other.pid);
                    }
                }
            }
        }
        let peers = unix_peers()?;
        Ok(Inspection { processes, outside, any_userfaultfd, peers, ipc, ..Inspection::default() })
    }

    fn refuse(&mut self, pid: impl Into<Option<i32>>, text: impl Into<String>) {
        self.add_finding(Severity::Refusal, pid, text);
    }

    fn warn(&mut self, pid: impl Into<Option<i32>>, text: impl Into<String>) {
        self.add_finding(Severity::Warning, pid, text);
    }

    fn note(&mut self, pid: impl Into<Option<i32>>, text: impl Into<String>) {
        self.add_finding(Severity::Note, pid, text);
    }

    fn add_finding(&mut self, weight: Severity, pid: impl Into<Option<i32>>, text: impl Into<String>) {
        let finding = Finding { weight, pid: pid.into(), text: text.into() };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    fn check_machine(&mut self, criu: &Criu) -> Result<(), Error> {
        self.check_rights();
        let (version, features) = criu.capabilities()?;
        let (kernel, major, minor) = (host::kernel(), version.major, version.minor);
        self.note(None, format!("kernel {kernel}, criu {major}.{minor}"));
        if features.lazy_pages != Some(true) {
            let text = "memory cannot be fetched on demand, because userfaultfd is not available: only `--restore \
                        eager` works";
            self.warn(None, text);
        }
        if features.mem_track != Some(true) {
            let text = "the kernel does not track changes of memory (CONFIG_MEM_SOFT_DIRTY): stillpoint reads all \
                        memory in each pass and compares it with the previous pass; in the last pass criu sends all \
                        pages, and unchanged pages are not written again";
            self.note(None, text);
        }
        Ok(())
    }

    /// Reports rights of this process that criu needs, and that are missing if it does not have all rights of root.
    fn check_rights(&mut self) {
        let effective = Process::myself().and_then(|own| own.status()).map_or(u64::MAX, |status| status.capeff);
        let missing = |rights: &[(u32, &str)]| -> Vec<String> {
            let lacking = rights.iter().filter(|(number, _)| effective >> number & 1 == 0);
            lacking.map(|(_, name)| (*name).to_owned()).collect()
        };
        let needed = missing(&REQUIRED_CAPABILITIES);
        if !needed.is_empty() {
            self.refuse(None, format!("this process does not have {}", needed.join(", ")));
        }
        if !missing(&[RESOURCE_CAPABILITY]).is_empty() {
            let text = "this process does not have CAP_SYS_RESOURCE: a restore with the same rights fails if the \
                        program has higher hard limits or a lower oom_score_adj than the restore may set; this check \
                        does not compare them";
            self.warn(None, text);
        }
    }

    fn check_process(&mut self, process: &Process) -> Result<(), procfs::ProcError> {
        let pid = process.pid;
        let status = process.status()?;
        if status.tracerpid != 0 {
            self.refuse(pid, format!("is traced by {}", describe_process(status.tracerpid)));
        }
        if process.stat()?.state == 'Z' {
            return Ok(());
        }
        if self.any_userfaultfd
            && kernel_files::bytes(format!("/proc/{pid}/smaps")).is_ok_and(|smaps| has_userfaultfd(&smaps))
        {
            let text = "its memory is still being fetched from an image, and pages that are not resident would be \
                        stored as zeros: wait until `stillpoint kernel status` reports that no memory is being fetched";
            self.refuse(pid, text);
        }
        self.check_namespaces(process);
        self.check_maps(process)?;
        for (number, target) in descriptors(pid) {
            self.check_descriptor(pid, number, &target);
        }
        if process.exe().is_ok_and(|exe| exe.to_string_lossy().ends_with(" (deleted)")) {
            let text = "its program file was replaced on disk: the image contains the code that the process has mapped";
            self.warn(pid, text);
        }
        Ok(())
    }

    fn check_namespaces(&mut self, process: &Process) {
        // Not the time namespace: criu restores into one, and takes it along the next time.
        for name in ["mnt", "pid", "net", "ipc", "user", "uts"] {
            let link = |pid: &str| kernel_files::link(format!("/proc/{pid}/ns/{name}")).ok();
            let there = link(&process.pid.to_string());
            let comes_along = name == "ipc" && there.is_some() && there == self.ipc;
            if there != link("self") && !comes_along {
                let text = format!("is in another {name} namespace; that is not supported yet");
                self.refuse(process.pid, text);
            }
        }
    }

    fn check_maps(&mut self, process: &Process) -> Result<(), procfs::ProcError> {
        let pid = process.pid;
        let most = private_mapping_max();
        for map in process.maps()? {
            let bytes = map.address.1 - map.address.0;
            if map.pathname == MMapPath::Anonymous && most.is_some_and(|most| bytes > most) {
                let text = format!(
                    "reserves {} GiB of address space at {:#x}, which the kernel refuses to a restore: set \
                     vm.overcommit_memory=1 (MariaDB: or innodb_buffer_pool_size_max)",
                    bytes >> 30,
                    map.address.0
                );
                self.refuse(pid, text);
            }
            match &map.pathname {
                MMapPath::Vsys(_) if ipc::shares_namespace(pid) => {
                    let text = format!(
                        "uses SysV shared memory at {:#x}: run it in an IPC namespace of its own (unshare --ipc; \
                         `stillpoint kernel dropin` prints the setting for a unit)",
                        map.address.0
                    );
                    self.refuse(pid, text);
                }
                MMapPath::Path(path) if path.to_string_lossy().contains("anon_hugepage") => {
                    self.note(pid, "has huge pages: they are restored before the program runs");
                }
                MMapPath::Path(path) if path.to_string_lossy().contains("[io_uring]") => {
                    self.refuse(pid, IO_URING_TEXT);
                }
                MMapPath::Path(path) if is_secret(&path.to_string_lossy()) => {
                    self.refuse(pid, SECRET_MEMORY_TEXT);
                }
                // anonymous shared memory has this name
                MMapPath::Path(path) if is_memory(path) => {}
                MMapPath::Path(path) if path.starts_with("/dev/") && map.perms.contains(MMPermissions::SHARED) => {
                    self.refuse(pid, format!("maps the device {}", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_descriptor(&mut self, pid: i32, number: i32, target: &str) {
        let refuse = |inspection: &mut Self, text: String| inspection.refuse(pid, text);
        match parse_numbered(target) {
            _ if is_secret(target) => refuse(self, SECRET_MEMORY_TEXT.into()),
            Some(("socket", inode)) => self.check_socket(pid, number, inode),
            Some((_, inode)) => {
                if let Some(other) = self.outside.get(&inode).copied() {
                    let who = describe_process(other);
                    let text = format!("descriptor {number} is a pipe to {who}, which is not part of the checkpoint");
                    self.refuse(pid, text);
                }
            }
            None => match target.strip_prefix("anon_inode:").map(|kind| kind.trim_matches(['[', ']'])) {
                Some("io_uring") => refuse(self, IO_URING_TEXT.into()),
                Some("eventfd" | "eventpoll" | "signalfd" | "timerfd" | "inotify" | "fanotify" | "pidfd") => {}
                Some(kind) => refuse(self, format!("descriptor {number} is a {kind}, which criu does not support")),
                None => self.check_file(pid, number, target),
            },
        }
    }

    fn check_file(&mut self, pid: i32, number: i32, target: &str) {
        if let Some(path) = target.strip_suffix(" (deleted)") {
            let size = kernel_files::metadata(format!("/proc/{pid}/fd/{number}")).map_or(0, |file| file.size());
            let weight = if size > GHOST_LIMIT { Severity::Refusal } else { Severity::Note };
            let text =
                format!("has {path} open, which was deleted ({size} bytes; the image can contain up to {GHOST_LIMIT})");
            if !path.starts_with("/memfd:") {
                self.add_finding(weight, pid, text);
            }
            return;
        }
        let passes = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];
        if target.starts_with("/dev/pts/") {
            let text = format!("descriptor {number} is the terminal {target}: this terminal must exist at the restore");
            self.warn(pid, text);
        } else if target.starts_with("/dev/") && !target.starts_with("/dev/shm/") && !passes.contains(&target) {
            self.refuse(pid, format!("has the device {target} open"));
        } else if target.starts_with('/') && !Path::new(&format!("/proc/{pid}/root{target}")).exists() {
            self.refuse(pid, format!("has {target} open, and no file with that name exists"));
        }
    }

    fn check_socket(&mut self, pid: i32, number: i32, inode: u64) {
        let peer = u32::try_from(inode).ok().and_then(|inode| self.peers.get(&inode)).copied();
        let other = peer.and_then(|peer| self.outside.get(&u64::from(peer))).copied();
        if let Some(other) = other {
            let who = describe_process(other);
            let text = format!("descriptor {number} is connected with {who}, which is not part of the checkpoint");
            self.refuse(pid, text);
        }
        let protocol = socket_protocol(pid, number);
        if let Some(protocol) = protocol.filter(|name| !SUPPORTED_PROTOCOLS.contains(&name.as_str())) {
            let text = format!("descriptor {number} is a socket of {protocol}, which criu does not support");
            self.refuse(pid, text);
        }
        self.ports.insert(inode);
    }

    /// Reports connections, once for all processes.
    fn report_connections(&mut self) {
        use procfs::net::TcpState;
        let (mut established, mut waiting) = (0, 0);
        for entry in procfs::net::tcp().into_iter().chain(procfs::net::tcp6()).flatten() {
            if self.ports.contains(&entry.inode) {
                established += usize::from(entry.state == TcpState::Established);
                waiting += if entry.state == TcpState::Listen { entry.rx_queue } else { 0 };
            }
        }
        self.note(None, format!("{established} established TCP connections are part of the checkpoint"));
        if waiting > 0 {
            let text = format!(
                "{waiting} connections are not accepted yet; those that are not accepted before the freeze are dropped"
            );
            self.warn(None, text);
        }
    }
}

/// Returns true if another process serves pages of a process, according to its mappings.
fn has_userfaultfd(smaps: &[u8]) -> bool {
    let flags = smaps.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"VmFlags:"));
    flags.into_iter().any(|flags| flags.split(|byte| *byte == b' ').any(|flag| flag == b"um"))
}

const IO_URING_TEXT: &str = "uses io_uring, which criu does not support; MariaDB: innodb_use_native_aio=OFF";

const SECRET_MEMORY_TEXT: &str = "has memory that no other process can read (memfd_secret), so criu cannot store it";

/// Rights without which criu does not work: number and name.
const REQUIRED_CAPABILITIES: [(u32, &str); 6] = [
    (1, "CAP_DAC_OVERRIDE"),
    (6, "CAP_SETGID"),
    (7, "CAP_SETUID"),
    (12, "CAP_NET_ADMIN"),
    (19, "CAP_SYS_PTRACE"),
    (21, "CAP_SYS_ADMIN"),
];
/// Right to raise hard limits, and to lower the chance that a process is killed for memory.
const RESOURCE_CAPABILITY: (u32, &str) = (24, "CAP_SYS_RESOURCE");

/// Returns true for the kernel's name of a file of memfd_secret.
fn is_secret(name: &str) -> bool {
    name.strip_suffix(" (deleted)") == Some("/secretmem")
}

/// Returns the longest private mapping that the kernel allows, or `None` if it does not count. criu maps reserved
/// ranges as writable memory, and then the kernel counts them.
fn private_mapping_max() -> Option<u64> {
    let policy = kernel_files::text("/proc/sys/vm/overcommit_memory").ok()?;
    let memory = <procfs::Meminfo as procfs::Current>::current().ok()?;
    (policy.trim() != "1").then_some(memory.mem_total + memory.swap_total)
}

/// Returns true for names of shared memory that is not a device, though it is in `/dev`.
fn is_memory(path: &Path) -> bool {
    let path = path.to_string_lossy();
    path.starts_with("/dev/zero") || path.starts_with("/dev/shm/")
}

/// Returns numbers and targets of a process's descriptors.
fn descriptors(pid: i32) -> Vec<(i32, String)> {
    let directory = Path::new("/proc").join(pid.to_string()).join("fd");
    let target = |name: OsString| {
        let number = name.to_string_lossy().parse().ok()?;
        Some((number, kernel_files::link(directory.join(&name)).ok()?.to_string_lossy().into_owned()))
    };
    kernel_files::names(&directory).into_iter().filter_map(target).collect()
}

/// Parses `socket:[123]` and `pipe:[123]`.
fn parse_numbered(target: &str) -> Option<(&str, u64)> {
    let (kind, number) = target.split_once(":[")?;
    let number = number.strip_suffix(']')?.parse().ok()?;
    matches!(kind, "socket" | "pipe").then_some((kind, number))
}

/// Protocols that criu takes along, by the kernel's names.
const SUPPORTED_PROTOCOLS: [&str; 11] =
    ["TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "UNIX", "UNIX-STREAM", "NETLINK", "PACKET", "RAW"];

/// Returns the kernel's name for the protocol of a socket; sockets that are neither bound nor connected are in no
/// table.
fn socket_protocol(pid: i32, number: i32) -> Option<String> {
    let mut name = [0; 64];
    let path = format!("/proc/{pid}/fd/{number}");
    let length = rustix::fs::getxattr(path, "system.sockprotoname", &mut name).ok()?;
    let name = String::from_utf8_lossy(&name[..length.min(64)]).into_owned();
    Some(name.trim_end_matches('\0').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_with_numbers_are_told_from_paths() {
        assert_eq!(parse_numbered("socket:[4121]"), Some(("socket", 4121)));
        assert_eq!(parse_numbered("pipe:[7]"), Some(("pipe", 7)));
        assert_eq!(parse_numbered("/tmp/socket:[7]"), None);
        assert_eq!(parse_numbered("anon_inode:[eventfd]"), None);
    }

    #[test]
    fn secret_memory_is_told_from_a_file_of_that_name() {
        assert!(is_secret("/secretmem (deleted)"));
        assert!(!is_secret("/secretmem") && !is_secret("/tmp/secretmem (deleted)"));
    }

    #[test]
    fn memory_that_others_bring_is_known_by_its_mappings() {
        let smaps =
            |flags: &str| format!("7f00-7f10 rw-p 0 00:00 0\nSize: 64 kB\nVmFlags: rd wr {flags} \n7f20-7f30 rw-p\n");
        assert!(has_userfaultfd(smaps("mr um me").as_bytes()));
        assert!(!has_userfaultfd(smaps("mr mw me").as_bytes()));
        assert!(!has_userfaultfd(&kernel_files::bytes("/proc/self/smaps").unwrap()));
    }

    #[test]
    fn sockets_say_what_they_speak() {
        use std::os::fd::AsRawFd;
        let pid = std::process::id() as i32;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(socket_protocol(pid, listener.as_raw_fd()).as_deref(), Some("TCP"));
        let (one, _two) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(SUPPORTED_PROTOCOLS.contains(&socket_protocol(pid, one.as_raw_fd()).unwrap().as_str()));
    }

    #[test]
    fn refusals_are_named_with_their_process() {
        let refusal = Finding::refusal(Some(1), "is traced".into());
        let note = Finding { weight: Severity::Note, pid: None, text: "fine".into() };
        let report = |findings| Report { pids: vec![1], findings, volatile: VolatileObjects::default() };
        assert!(report(vec![note.clone()]).require_no_refusal().is_ok());
        let error = report(vec![note, refusal]).require_no_refusal().unwrap_err();
        assert!(error.is_refusal());
        assert!(error.to_string().starts_with("process 1 (") && error.to_string().ends_with("): is traced"));
    }
}
