//! Random choices that are the same for the same seed.

pub use stillpoint_base::Random;

/// Returns a seed from the present time, for the long form.
pub fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64
}
