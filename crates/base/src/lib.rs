//! Arithmetic that every pillar needs: pages of memory, waits that grow, numbers that are the same for the same seed.
#![forbid(unsafe_code)]

mod backoff;
mod page;
mod random;

pub use backoff::Backoff;
pub use page::{PAGE, crosses_page, page_start};
pub use random::Random;
