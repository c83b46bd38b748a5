//! Order of the units: quick ones first, then those that wait for others, some side by side, then the rest one by one.

use crate::programs::Unit;

/// Packages in the order of their tests: what others build on comes first. A package without a place comes after these.
const ORDER: [&str; 9] = [
    "xtask",
    "stillpoint-events",
    "stillpoint-patch-format",
    "stillpoint-patch-insn",
    "stillpoint-patch-unwind",
    "stillpoint-measure",
    "stillpoint-patch-tracee",
    "stillpoint-patch-engine",
    "stillpoint",
];

/// Modules that spend most of their time waiting for servers and disks, and time nothing: several of them run side by side.
const WAITING: [(&str, &[&str]); 4] = [
    (
        "stillpoint-migrate-tests",
        &[
            "proxy::drivers",
            "proxy::hostile",
            "proxy::metrics",
            "proxy::pass",
            "proxy::regress",
            "proxy::replication",
            "proxy::signals",
            "proxy::silent",
            "proxy::startup",
            "proxy::tls",
        ],
    ),
    (
        "stillpoint-migrate-tests",
        &[
            "engine::attach",
            "engine::check",
            "engine::faults",
            "engine::holds",
            "engine::names",
            "engine::regress",
            "engine::run",
            "engine::since",
            "engine::targets",
            "engine::tls",
        ],
    ),
    (
        "stillpoint-migrate-tests",
        &["bypass", "carried", "faults", "guardian", "levels", "modes", "secrets", "targets", "versions"],
    ),
    ("stillpoint-patch-tests", &["eintr"]),
];

/// Units that run at the same time, where they may.
pub(crate) const SIDE_BY_SIDE: usize = 2;

/// Units in the order in which they run.
pub(crate) struct Schedule {
    /// One after another, at first.
    pub(crate) quick: Vec<Unit>,
    /// Up to [`SIDE_BY_SIDE`] at a time.
    pub(crate) waiting: Vec<Unit>,
    /// One after another, with the machine for themselves.
    pub(crate) alone: Vec<Unit>,
}

impl Schedule {
    /// Gives each unit its turn.
    pub(crate) fn new(units: Vec<Unit>) -> Schedule {
        let (mut quick, others): (Vec<Unit>, Vec<Unit>) = units.into_iter().partition(Unit::is_unit);
        let (waiting, mut alone): (Vec<Unit>, Vec<Unit>) = others.into_iter().partition(is_waiting);
        quick.sort_by_key(rank);
        alone.sort_by_key(rank);
        Schedule { quick, waiting, alone }
    }
}

fn is_waiting(unit: &Unit) -> bool {
    WAITING.iter().any(|(package, modules)| unit.package() == *package && modules.iter().any(|m| unit.is_called(m)))
}

fn rank(unit: &Unit) -> (usize, String) {
    (ORDER.iter().position(|name| *name == unit.package()).unwrap_or(ORDER.len()), unit.name())
}
