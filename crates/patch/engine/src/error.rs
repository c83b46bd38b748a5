//! Errors of this crate, and the state of the service after each.

use crate::ledger::LedgerError;
use crate::link::LinkError;
use stillpoint_host as host;
use stillpoint_patch_format::{Avma, BuildId};
use stillpoint_patch_insn as insn;
use stillpoint_patch_tracee as tracee;
use stillpoint_patch_tracee::{Pid, Tid};

/// State of the service after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceState {
    /// Nothing was changed.
    Untouched,
    /// The service runs the code that it ran before.
    OldSide,
    /// A transition was begun, and rolled back.
    RolledBack,
    /// The process has ended, or runs another program.
    Ended,
    /// A transition is incomplete; the next call completes it or rolls it back.
    Unfinished,
}

/// Every failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation on the process failed.
    #[error(transparent)]
    Tracee(#[from] tracee::Error),
    /// A test requested the failure.
    #[error(transparent)]
    Fault(#[from] stillpoint_operation::Fault),
    /// The process is frozen: no thread of it can be stopped at a known place, nor run for us.
    #[error("process {pid} is frozen by control group {group}")]
    Frozen {
        /// The process.
        pid: Pid,
        /// The group.
        group: String,
    },
    /// The process traces this command, or a process that waits for it: to stop it would stop this command.
    #[error("process {0} traces this command, or a process that has started it")]
    OwnTracer(Pid),
    /// The process maps the file of the patch more than once.
    #[error("process {pid} maps {count} copies of {file}, and only one can be patched")]
    ManyCopies {
        /// The process.
        pid: Pid,
        /// Number of copies.
        count: usize,
        /// File name in the patch.
        file: Box<str>,
    },
    /// The ledger cannot be used.
    #[error("the ledger of the target cannot be used")]
    Ledger(#[from] LedgerError),
    /// There is more than one ledger.
    #[error("process {0} holds more than one ledger")]
    MultipleLedgers(Pid),
    /// It is unknown if the process is patched.
    #[error("process {0} has too much read-only memory without a file to be searched for a ledger")]
    TooMuchMemory(Pid),
    /// No module of the process has the build-id that the patch is made for.
    #[error("patch {patch} is made for build-id {wanted} ({file}), which process {pid} does not map{hint}")]
    NoModule {
        /// The patch.
        patch: String,
        /// Build-id of the patch.
        wanted: BuildId,
        /// File name in the patch.
        file: Box<str>,
        /// The process.
        pid: Pid,
        /// File that is mapped under that name instead.
        hint: Box<str>,
        /// Path of that file as the process sees it, if it is a library.
        library: Option<Box<str>>,
    },
    /// The module has no build-id and its text is not the one that the patch was made for.
    #[error("patch {patch}: the text of {file} in process {pid} is not the text that the patch was made for")]
    OtherText {
        /// The patch.
        patch: String,
        /// The file.
        file: String,
        /// The process.
        pid: Pid,
    },
    /// Bytes in memory differ from those that the patch was made for.
    #[error("{function} at {at}: bytes in memory differ from those that the patch was made for (offset {offset})")]
    BytesDiffer {
        /// The function.
        function: String,
        /// Its entry.
        at: Avma,
        /// First byte that differs.
        offset: usize,
    },
    /// A function cannot be redirected.
    #[error("{function} cannot be redirected")]
    Entry {
        /// The function.
        function: String,
        /// Reason.
        #[source]
        source: insn::Error,
    },
    /// The jump at an entry would cross a page.
    #[error("{function} at {at}: a jump there would cross a page boundary and could not be written atomically")]
    EntryCrossesPage {
        /// The function.
        function: String,
        /// Its entry.
        at: Avma,
    },
    /// A uprobe is set on a function.
    #[error(
        "{function} has a uprobe set at {at} ({probe}): remove the probe first; a jump there would crash the process"
    )]
    Uprobe {
        /// The function.
        function: String,
        /// Address of the probe.
        at: Avma,
        /// Name of the probe.
        probe: String,
    },
    /// The target uses a feature that a patch would break.
    #[error("process {pid} {what}")]
    Unsuitable {
        /// The process.
        pid: Pid,
        /// That feature.
        what: String,
    },
    /// Frames of the program may be located where they look like other data, or such a frame was found.
    #[error("process {pid} switches stacks by itself ({why}): {frames}")]
    SuspendedFrames {
        /// The process.
        pid: Pid,
        /// Sign that it does.
        why: String,
        /// The frame found, or a statement that frames may be missed.
        frames: String,
    },
    /// A control group of the process has too little memory left; the kernel would kill one of its processes.
    #[error("process {pid}: control group {group} has {} KiB left, and the patch needs {} KiB", free >> 10, needed.div_ceil(1024))]
    MemoryLimit {
        /// The process.
        pid: Pid,
        /// Directory of the group.
        group: String,
        /// Bytes that are free or reclaimable.
        free: u64,
        /// Bytes that are needed, with a reserve.
        needed: u64,
    },
    /// Exceptions could not pass through the new code.
    #[error("process {pid}: unwinders cannot find new code: {why}")]
    Invisible {
        /// The process.
        pid: Pid,
        /// Reason.
        why: String,
    },
    /// A symbol cannot be resolved.
    #[error("symbol `{symbol}` of patch {patch}: {why}")]
    Symbol {
        /// The patch.
        patch: String,
        /// The symbol.
        symbol: String,
        /// Reason.
        why: String,
    },
    /// The patch does not link.
    #[error("patch {patch} does not link")]
    Link {
        /// The patch.
        patch: String,
        /// Reason.
        #[source]
        source: LinkError,
    },
    /// There is no room for the arena within reach of the module.
    #[error("no room for {len} bytes within 2 GiB of {module}")]
    NoRoom {
        /// Bytes needed.
        len: u64,
        /// The module.
        module: String,
    },
    /// No word of the thread control block is free.
    #[error("process {0}: no free word of the thread control block is zero in all threads")]
    NoWord(Pid),
    /// The patch builds upon diffs that are not active.
    #[error("patch {patch} is based on {diff}, which is not active")]
    NotBased {
        /// The patch.
        patch: String,
        /// The diff.
        diff: String,
    },
    /// The patch changes what an active patch changes, and does not contain the active patch's diffs.
    #[error("patch {patch} changes `{object}`, and would undo the change that patch {active} has made to it")]
    Undoes {
        /// The patch.
        patch: String,
        /// Function or constant that both change.
        object: String,
        /// The active patch.
        active: String,
        /// Diff of the active patch that the other one lacks.
        diff: Option<String>,
    },
    /// A patch of that name, but with other contents, is active.
    #[error("another patch with the name {0} is active")]
    NameTaken(String),
    /// No patch of that name is active.
    #[error("no patch {name} is active")]
    NotActive {
        /// Name that the caller gave.
        name: String,
        /// Names of the active patches, oldest first.
        active: Vec<String>,
    },
    /// No patch is active.
    #[error("no patch is active in process {0}")]
    NothingActive(Pid),
    /// Other patches are above it.
    #[error("patch {below} is below {above}: only the newest patch can be reverted")]
    NotOnTop {
        /// The patch to be reverted.
        below: String,
        /// The patch above it.
        above: String,
    },
    /// The patch requires more than the quiescence mode guarantees.
    #[error("patch {patch} has scope {scope}: its old and new code must not run at the same time")]
    Scope {
        /// The patch.
        patch: String,
        /// Its scope.
        scope: String,
    },
    /// The mode needs quiescence points, and the target has none.
    #[error("--quiescence {mode} needs quiescence points in process {pid}: {why}")]
    NoPoints {
        /// The process.
        pid: Pid,
        /// The mode.
        mode: String,
        /// The missing condition.
        why: String,
    },
    /// The kernel does not support generations.
    #[error("this kernel does not support address-space generations")]
    NoGenerations,
    /// A killed tool left threads in a generation.
    #[error("a tool that was killed has left threads of process {0} in an address-space generation")]
    AbandonedThreads(Pid),
    /// The mode `stop` has no use with generations.
    #[error(
        "--view generation migrates threads one by one, or while they are blocked at their quiescence points; --quiescence stop is not supported"
    )]
    StopUnsupported,
    /// The patch changes constants in place.
    #[error("patch {0} changes code or constants in place, which only --view generation supports")]
    ByGenerationsOnly(String),
    /// The patch lets threads stay in old code.
    #[error("patch {patch} lets threads stay in {functions}, which only --view generation supports")]
    StayingByGenerationsOnly {
        /// The patch.
        patch: String,
        /// The functions.
        functions: String,
    },
    /// A transition waits for threads that may stay in old code.
    #[error("threads of process {pid} stay in {functions} and have not migrated")]
    ThreadsStay {
        /// The process.
        pid: Pid,
        /// Functions in which they may stay.
        functions: String,
    },
    /// A constant is located in writable memory.
    #[error("constant {name} at {at} is located in writable memory")]
    NotConstant {
        /// Name of the constant.
        name: String,
        /// Address of the constant.
        at: Avma,
    },
    /// A variable does not hold what it is expected to hold.
    #[error(
        "the program has changed `{name}` at {at} (offset {offset}): it no longer holds {}",
        .patch.as_ref().map_or("its initial value".to_owned(), |patch| format!("what patch {patch} wrote"))
    )]
    DataWritten {
        /// Name of the variable.
        name: String,
        /// Its address.
        at: Avma,
        /// First byte that differs.
        offset: usize,
        /// The active patch that wrote the variable last.
        patch: Option<String>,
    },
    /// A variable is located where it cannot be written.
    #[error("`{name}` at {at} {why}")]
    DataUnwritable {
        /// Name of the variable.
        name: String,
        /// Its address.
        at: Avma,
        /// Reason.
        why: String,
    },
    /// The patch changes data for all threads at once.
    #[error("patch {0} changes data for all threads at once, which --view generation does not support")]
    DataByTrampolinesOnly(String),
    /// A change of data was begun, and no thread of the process has run to complete it.
    #[error("process {0} is stopped in the middle of a change of data, which its threads complete when they run")]
    DataChanging(Pid),
    /// The library's control block no longer has its known form.
    #[error("the control block of libstillpoint at {0} has unexpected contents")]
    Control(Avma),
    /// A hook aborted the operation.
    #[error("the hook at {at} returned {returned}")]
    Hook {
        /// Address of the hook.
        at: Avma,
        /// Returned value.
        returned: i32,
    },
    /// The transition was rolled back at its deadline.
    #[error("not every thread could be migrated in time: {}", describe(.0))]
    TimedOut(Vec<Busy>),
    /// The transition could be neither completed nor rolled back in time.
    #[error("transition {transition} could be neither completed nor rolled back in time: {}", describe(.busy))]
    Stuck {
        /// Number of the transition.
        transition: u32,
        /// Busy threads, each with its code.
        busy: Vec<Busy>,
    },
    /// The process ended meanwhile.
    #[error("process {0} ended or called exec during the operation")]
    Ended(Pid),
    /// A transition failed and was rolled back.
    #[error("transition {transition} was rolled back")]
    RolledBack {
        /// Number of the transition.
        transition: u32,
        /// Reason.
        #[source]
        source: Box<Error>,
    },
    /// A transition failed while it was incomplete.
    #[error("transition {transition} is incomplete")]
    Unfinished {
        /// Number of the transition.
        transition: u32,
        /// Reason.
        #[source]
        source: Box<Error>,
    },
    /// Another user can change the location of our files, they cannot be written, or the processes of a service cannot be found.
    #[error(transparent)]
    Host(#[from] host::Error),
    /// Files of this tool cannot be written or read.
    #[error("{path}")]
    File {
        /// The file.
        path: String,
        /// Reason.
        #[source]
        source: std::io::Error,
    },
}

/// A thread that could not be migrated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Busy {
    /// The thread.
    pub tid: Tid,
    /// Code that was found on its stack.
    pub function: String,
}

fn describe(busy: &[Busy]) -> String {
    if busy.is_empty() {
        return "new threads start faster than they can be examined".to_owned();
    }
    let some = busy.iter().take(4).map(|b| format!("thread {} is in {}", b.tid, b.function));
    let more = if busy.len() > 4 { format!(", and {} more", busy.len() - 4) } else { String::new() };
    some.collect::<Vec<_>>().join(", ") + &more
}

impl Error {
    /// Converts the error of a transition that failed while it was incomplete.
    pub(crate) fn unfinished(self, transition: u32) -> Error {
        Error::Unfinished { transition, source: Box::new(self) }
    }

    /// Converts the time-out of a rollback.
    pub(crate) fn stuck(self, transition: u32) -> Error {
        match self {
            Error::TimedOut(busy) => Error::Stuck { transition, busy },
            other => other,
        }
    }

    /// Converts the error of a failed rollback.
    pub(crate) fn not_undone(self, transition: u32) -> Error {
        match self {
            Error::Ended(_) | Error::Stuck { .. } => self,
            other => other.unfinished(transition),
        }
    }

    /// Returns the state of the service after this failure.
    pub fn service_state(&self) -> ServiceState {
        match self {
            Error::RolledBack { .. } | Error::TimedOut(_) => ServiceState::RolledBack,
            Error::Unfinished { .. } | Error::Stuck { .. } | Error::DataChanging(_) => ServiceState::Unfinished,
            Error::Ended(_) => ServiceState::Ended,
            Error::Hook { .. } | Error::File { .. } => ServiceState::OldSide,
            _ => ServiceState::Untouched,
        }
    }

    /// Returns the next step for the operator, if there is one.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::Tracee(error) => return tracee_hint(error),
            Error::MemoryLimit { .. } => {
                "raise the memory limit of the group, for example by `systemctl set-property UNIT MemoryMax=`"
            }
            Error::SuspendedFrames { .. } => {
                "stillpoint patch enable and a restart; or --allow-suspended-frames, if old code may continue to run in a coroutine"
            }
            Error::TimedOut(_) => "a longer --timeout, or add a quiescence point",
            Error::RolledBack { source, .. } => return source.hint(),
            Error::Stuck { .. } | Error::Unfinished { .. } => {
                "the same command again: it completes the transition or rolls it back"
            }
            Error::NotOnTop { above, .. } => return Some(format!("revert {above} first, or --all")),
            Error::Scope { scope, .. } if scope == "process" => "--quiescence global, or stop",
            Error::Scope { .. } => "--quiescence group:NAME, global or stop",
            Error::NoPoints { .. } => "--quiescence probe, or stop",
            Error::Host(host::Error::Untrusted { .. }) => {
                "a directory that only you and root can change, below your home or /run"
            }
            Error::Frozen { group, .. } => {
                return Some(format!("the same command when control group {group} is thawed"));
            }
            Error::OwnTracer(_) => "the same command outside of that debugger",
            Error::NoModule { pid, library, .. } => {
                let running = library.as_ref().map_or("exe".to_owned(), |path| format!("root{path}"));
                return Some(format!(
                    "stillpoint patch build --target /proc/{pid}/{running} ..., which builds it for the running file"
                ));
            }
            Error::OtherText { pid, .. } => {
                return Some(format!(
                    "stillpoint patch build --target /proc/{pid}/exe ..., which builds it for the running file"
                ));
            }
            Error::NotActive { active, .. } => {
                return Some(format!("one of the active patches: {}", active.join(", ")));
            }
            Error::NothingActive(_) => "stillpoint patch list",
            Error::BytesDiffer { .. } => {
                "stillpoint patch status, which names entries that another tool changed; or restart the process"
            }
            Error::Uprobe { .. } => {
                "remove the probe (`perf probe --list` or `bpftool perf list` names its owner), then this command again"
            }
            Error::Symbol { .. } | Error::Link { .. } => {
                "stillpoint patch build with the options as before, by this version of stillpoint"
            }
            Error::Entry { .. }
            | Error::EntryCrossesPage { .. }
            | Error::Unsuitable { .. }
            | Error::Invisible { .. }
            | Error::NoRoom { .. }
            | Error::NoWord(_)
            | Error::NotConstant { .. }
            | Error::ManyCopies { .. }
            | Error::DataUnwritable { .. } => {
                "upgrade the package and restart the service: this process cannot get the patch"
            }
            Error::Ledger(_) | Error::MultipleLedgers(_) | Error::TooMuchMemory(_) | Error::Control(_) => {
                "restart the service: what its memory states about patches cannot be relied on"
            }
            Error::Hook { .. } => {
                "the log of the program, in which a hook can state its reason; see stillpoint-patch-hooks(7)"
            }
            Error::Ended(_) => "the same command for the process that runs now, for example with --unit NAME",
            Error::File { .. } => "a path that exists and that this user can read and write",
            Error::NoGenerations | Error::DataByTrampolinesOnly(_) => "--view trampoline",
            Error::DataWritten { patch: None, .. } => {
                "patch build without --write-data and a hook that changes the value, see stillpoint-patch-hooks(7); or a restart of the service"
            }
            Error::DataWritten { .. } => "leave the patch applied until the service is restarted with the new version",
            Error::DataChanging(pid) => return Some(format!("`kill -CONT {pid}`, then the same command again")),
            Error::ThreadsStay { .. } => {
                "apply again when these threads have left the functions, or revert, with --view generation"
            }
            Error::ByGenerationsOnly(_) | Error::StayingByGenerationsOnly { .. } => {
                "--view generation, on a kernel with address-space generations"
            }
            Error::AbandonedThreads(_) => {
                "the same command with --view generation: it completes the transition or rolls it back"
            }
            Error::StopUnsupported => "--quiescence probe, local, group:NAME or global, or --view trampoline",
            Error::NameTaken(_) => "revert it first, or --replace",
            Error::NotBased { .. } => "apply the patches of the series in order",
            Error::Undoes { active, diff, .. } => {
                let diff = diff.as_deref().unwrap_or("DIFF");
                return Some(format!(
                    "patch build with --on-top-of {diff}, or with all diffs at once and --replaces {active}"
                ));
            }
            Error::Host(host::Error::Service { service, .. }) if host::systemd::is_booted() => {
                return Some(format!("systemctl status {service}"));
            }
            Error::Host(
                host::Error::Service { .. } | host::Error::ServiceName { .. } | host::Error::NotInService(_),
            ) => "--pid N, or --exe PATH",
            Error::Fault(_) | Error::Host(_) => return None,
        };
        Some(hint.to_owned())
    }
}

/// Returns the next step after an operation on a process failed.
fn tracee_hint(error: &tracee::Error) -> Option<String> {
    let hint = match error {
        tracee::Error::Gone(_) => {
            "`pgrep -a NAME` for the number of a process that runs; or --exe PATH, or --unit NAME"
        }
        tracee::Error::NotAProcess { pid, .. } => return Some(format!("--pid {pid}")),
        tracee::Error::Zombie(_) => "the number of a process that runs (`pgrep -a NAME`): this one has ended",
        tracee::Error::KernelThread(_) | tracee::Error::Own(_) => "the number of another process (`pgrep -a NAME`)",
        tracee::Error::NotX86_64 { .. } => "a build of the program for 64-bit x86-64, and a restart",
        tracee::Error::Static(_) => "a build of the program that is linked with the shared C library, and a restart",
        tracee::Error::AlreadyTraced { tracer: Pid(0), .. } => "end the debugger, which runs outside of this container",
        tracee::Error::AlreadyTraced { tracer, name, .. } => {
            return Some(format!(
                "end process {tracer} ({name}), or its debugging session, and run this command again"
            ));
        }
        tracee::Error::Permission { hint, .. } if hint.contains("run as root") => "the same command as root",
        tracee::Error::Permission { hint, .. } if hint.contains("ptrace_scope is 3") => {
            "kernel.yama.ptrace_scope = 1 in a file of /etc/sysctl.d, and a reboot"
        }
        tracee::Error::Permission { .. } => "the same command outside of the container, or with CAP_SYS_PTRACE in it",
        tracee::Error::Unsupported(_) => "a newer kernel (`uname -r` shows the one that runs)",
        tracee::Error::Seccomp { .. } | tracee::Error::SeccompUnreadable { .. } => {
            "upgrade the package and restart the service: its seccomp filter keeps patches out"
        }
        tracee::Error::Unstoppable { .. } | tracee::Error::BadCarrier { .. } | tracee::Error::NoCarrier { .. } => {
            "the same command again, when the process is less busy"
        }
        tracee::Error::Exec(_) | tracee::Error::ThreadGone(_) => "the same command again",
        tracee::Error::GainsPrivileges(_) => "stillpoint patch apply, as root, once the program runs",
        tracee::Error::MappedFile { pid, .. } => {
            return Some(format!("the same command as root; `ls -l /proc/{pid}/map_files`"));
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_a_user_meets_first_have_a_next_step() {
        let pid = Pid(7);
        let permission = |hint: &str| tracee::Error::Permission { pid, hint: hint.into() };
        for (error, step) in [
            (tracee::Error::Gone(pid), "pgrep"),
            (tracee::Error::Zombie(pid), "pgrep"),
            (tracee::Error::Static(pid), "shared C library"),
            (tracee::Error::AlreadyTraced { pid, tracer: Pid(9), name: "gdb".into() }, "end process 9 (gdb)"),
            (permission("it belongs to user 101; run as root or with CAP_SYS_PTRACE"), "as root"),
            (permission("CAP_SYS_PTRACE is missing"), "outside of the container"),
        ] {
            let hint = Error::from(error).hint().unwrap_or_default();
            assert!(hint.contains(step), "{step}: {hint}");
        }
        let (patch, file, hint) = ("fix".to_owned(), "redis-server".into(), "".into());
        let mut other = Error::NoModule { patch, wanted: BuildId(vec![1]), file, pid, hint, library: None };
        assert!(other.hint().is_some_and(|hint| hint.contains("patch build --target /proc/7/exe ")));
        if let Error::NoModule { library, .. } = &mut other {
            *library = Some("/lib/x.so".into());
        }
        assert!(other.hint().is_some_and(|hint| hint.contains("patch build --target /proc/7/root/lib/x.so ")));
        let unknown = Error::NotActive { name: "x".into(), active: vec!["one".into(), "two".into()] };
        assert_eq!(unknown.hint().as_deref(), Some("one of the active patches: one, two"));
    }
}
