//! A load's recording as the proxy captures it, statements and rows of the same transactions, and what its replay comes to
//! in each mode of the scheduler, over real connections.

mod front;
mod live;
mod load;
mod player;
mod record;
mod replay;

use load::Shop;

pub use front::Front;
pub use live::{Busy, Migrated, busy};
pub use record::{Recording, record};
pub use replay::{Replayed, Target, Way};
