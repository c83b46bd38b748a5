//! Arithmetic that every pillar needs: pages of memory, waits that grow, numbers that are the same for the same seed.
//!
//! The caller guarantees a bound of [`Random`] that is not 0. The crate guarantees that its results depend on its arguments alone; [`Random`]
//! does not make secrets.
#![forbid(unsafe_code)]

mod backoff;
mod page;
mod random;

pub use backoff::Backoff;
pub use page::{PAGE, crosses_page, page_start};
pub use random::Random;
