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
            (Subject::Code, 1) if report.operations.len() == 1 => " while 1 change went into the running code".into(),
            (Subject::Code, done) => format!(" while {done} changes went into the running code"),
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
            "check" => "everything that stands against a switch is looked for; nothing is touched yet",
            "preload" => "the new kernel is put into memory",
            "passes" => "most memory is written to disk while the programs run",
            "close" => "new connections are made to wait",
            "drain" => "those that were just being made are let in",
            "guard" => "a firewall keeps all packets of the programs away: from here on clients wait",
            "freeze" => "the programs stand still; the rest of them is written to disk and sealed",
            "jump" => {
                "files go to disk, and the machine jumps to the next kernel, or falls back through the boot loader"
            }
            "boot" => "the kernel and its first programs come up; the firewall is there before any address is",
            "restore" => "each program is put together again as it was, and stands still",
            "release" => "all of them go on: from here on no image may be used any more",
            "confirm" => "a command of each program says that it serves",
            "lift" => "the firewall goes, and clients are told at once: they go on",
            "fill" => "memory that nobody has asked for comes; the images are removed",
            _ => return None,
        })
    }
}
