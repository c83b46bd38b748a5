//! The long form of tests: `make soak`.

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Whether the long form of the tests is asked for (`STILLPOINT_SOAK=1`).
pub fn is_soak() -> bool {
    variable("STILLPOINT_SOAK").as_deref() == Some("1")
}

/// How often a test does what it does: `short` times, or in the long form `long` times, of which one piece where it is run
/// in pieces (`STILLPOINT_SOAK_PIECES=N`).
pub fn rounds(short: usize, long: usize) -> usize {
    let pieces = variable("STILLPOINT_SOAK_PIECES").and_then(|n| n.parse().ok()).unwrap_or(1).max(1);
    if is_soak() { long.div_ceil(pieces) } else { short }
}
