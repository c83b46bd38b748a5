//! Order of the units: quick ones first, then units that mostly wait, some side by side, then the rest one by one.

use crate::programs::Unit;

/// Packages in the order of their tests: those that others depend on come first. A package that is not listed comes after these.
const ORDER: [&str; 10] = [
    "xtask",
    "stillpoint-base",
    "stillpoint-events",
    "stillpoint-patch-format",
    "stillpoint-patch-insn",
    "stillpoint-patch-unwind",
    "stillpoint-measure",
    "stillpoint-patch-tracee",
    "stillpoint-patch-engine",
    "stillpoint",
];

/// Modules that spend most of their time waiting for servers and disks, and measure no times: several of them run side by side.
const WAITING: [(&str, &[&str]); 4] = [
    (
        "stillpoint-migrate-tests",
        &[
            "proxy::drivers",
            "proxy::hostile_clients",
            "proxy::metrics",
            "proxy::passthrough",
            "proxy::regress",
            "proxy::replication",
            "proxy::signals",
            "proxy::silent_connections",
            "proxy::startup",
            "proxy::tls",
        ],
    ),
    (
        "stillpoint-migrate-tests",
        &[
            "engine::attach",
            "engine::check",
            "engine::database_contents",
            "engine::database_names",
            "engine::ddl_changes",
            "engine::faults",
            "engine::regress",
            "engine::run",
            "engine::targets",
            "engine::tls",
        ],
    ),
    (
        "stillpoint-migrate-tests",
        &[
            "bypass",
            "faults",
            "guardian",
            "isolation_levels",
            "replay_modes",
            "secrets",
            "session_state",
            "targets",
            "versions",
        ],
    ),
    ("stillpoint-patch-tests", &["eintr"]),
];

/// Number of units that run at the same time.
pub(crate) const SIDE_BY_SIDE: usize = 2;

/// Units in the order in which they run.
pub(crate) struct Schedule {
    /// Units that run first, one after another.
    pub(crate) quick: Vec<Unit>,
    /// Units that run up to [`SIDE_BY_SIDE`] at a time.
    pub(crate) waiting: Vec<Unit>,
    /// Units that run one after another, without any other.
    pub(crate) alone: Vec<Unit>,
}

impl Schedule {
    /// Sorts the units into these groups.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_module_that_waits_exists() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the tree");
        for (package, modules) in WAITING {
            let pillar = package.trim_start_matches("stillpoint-").trim_end_matches("-tests");
            for module in modules {
                let path = format!("crates/{pillar}/tests/it/{}.rs", module.replace("::", "/"));
                assert!(root.join(&path).exists(), "{path}");
            }
        }
    }
}
