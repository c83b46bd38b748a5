//! The long form of tests: `make soak`.

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Returns true if the long form of the tests is requested (`STILLPOINT_SOAK=1`).
pub fn is_soak() -> bool {
    variable("STILLPOINT_SOAK").as_deref() == Some("1")
}

fn number(name: &str) -> usize {
    variable(name).and_then(|n| n.parse().ok()).unwrap_or(1).max(1)
}

/// Returns the number of rounds of a test: `short`, or in the long form `long`, of which only one part if it is run in
/// pieces (`STILLPOINT_SOAK_PIECES=N`).
pub fn rounds(short: usize, long: usize) -> usize {
    if is_soak() { long.div_ceil(number("STILLPOINT_SOAK_PIECES")) } else { short }
}

/// Returns those of all cases that belong to the present piece (`STILLPOINT_SOAK_PIECE=K` of
/// `STILLPOINT_SOAK_PIECES=N`, from 1).
pub fn cases_of_part<T>(all: Vec<T>) -> Vec<T> {
    let (part_number, part_count) = (number("STILLPOINT_SOAK_PIECE"), number("STILLPOINT_SOAK_PIECES"));
    all.into_iter().skip(part_number - 1).step_by(part_count).collect()
}
