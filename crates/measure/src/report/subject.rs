//! Subject of a report, and the words for it.

use super::Report;
use crate::timeline::Ending;

/// Part of the system that changed under the clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    /// The code of a process.
    Code,
    /// The server that holds a database.
    Server,
    /// The kernel under several programs.
    Kernel,
}

impl Subject {
    pub(super) fn of(report: &Report) -> Subject {
        let any = |is: fn(&str) -> bool| report.operations.iter().any(|op| is(&op.operation.operation));
        if any(|name| name == "migrate" || name == "fallback") {
            Subject::Server
        } else if any(|name| name.starts_with("switch")) {
            Subject::Kernel
        } else {
            Subject::Code
        }
    }

    /// Property by which requests are coloured.
    pub(super) fn coloured_by(self) -> &'static str {
        match self {
            Subject::Code => "code version",
            Subject::Server => "server",
            Subject::Kernel => "kernel",
        }
    }

    /// Name of its first value.
    pub(super) fn at_first(self) -> &'static str {
        match self {
            Subject::Code => "as shipped",
            Subject::Server => "source",
            Subject::Kernel => "the old kernel",
        }
    }

    /// Title of the bar above a plot.
    pub(super) fn strip(self) -> &'static str {
        match self {
            Subject::Code => "patches",
            other => other.coloured_by(),
        }
    }

    /// Description of the operations during the load.
    pub(super) fn meanwhile(self, report: &Report) -> String {
        let fell_back =
            report.operations.iter().filter(|op| matches!(op.operation.ending, Ending::FellBack { .. })).count();
        match (self, report.committed()) {
            (Subject::Server, 1) => " while the database moved to another server".into(),
            (Subject::Server, times) => format!(" while the database changed servers {times} times"),
            (Subject::Code, 1) if report.operations.len() == 1 => " while 1 change was made to the running code".into(),
            (Subject::Code, done) => format!(" while {done} changes were made to the running code"),
            (Subject::Kernel, done) => {
                let times = |n: usize| match n {
                    1 => "once".to_owned(),
                    2 => "twice".to_owned(),
                    n => format!("{n} times"),
                };
                let back = match fell_back {
                    0 => String::new(),
                    n => format!(", and went back to the old one by itself {} as something failed", times(n)),
                };
                format!(" while the machine changed to another kernel {}{back}", times(done))
            }
        }
    }

    /// Explanation of a phase, if its name is not enough.
    pub(super) fn explain(self, phase: &str) -> Option<&'static str> {
        if self != Subject::Kernel {
            return None;
        }
        Some(match phase.trim_end_matches(" again") {
            "check" => "all obstacles to a switch are searched; nothing is changed yet",
            "preload" => "the new kernel is loaded into memory",
            "passes" => "most memory is written to disk while the programs run",
            "close" => "new connections are made to wait",
            "drain" => "connections that are being made are accepted",
            "guard" => "a firewall drops all packets of the programs: from now on clients wait",
            "freeze" => "the programs are stopped; the rest of their memory is written to disk and sealed",
            "jump" => {
                "files are written to disk, and the machine starts the next kernel by kexec, or falls back through the boot loader"
            }
            "boot" => "the kernel and its first programs start; the firewall is active before any address",
            "restore" => "each program is restored as it was, and stays stopped",
            "release" => "all programs continue: from now on no image may be used any more",
            "confirm" => "a command of each program reports that it serves",
            "lift" => "the firewall is removed, and clients are informed at once: they continue",
            "fill" => "the rest of memory is fetched in the background; the images are removed",
            _ => return None,
        })
    }
}
