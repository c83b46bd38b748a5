//! A load's recording as the proxy captures it, statements and rows of the same transactions, and its replay in each
//! mode of the scheduler, over real connections.

mod load;
mod record;
mod replay;
mod servers;

use load::Shop;

pub use load::{LoadClients, busy};
pub use record::{Recording, record};
pub use replay::{ReplayResult, Target};
pub use servers::ProxiedServers;
pub use stillpoint_migrate_engine::statement_replay::ReplaySettings;
