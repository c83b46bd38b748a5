//! Work of a guardian after the command that it watches has died.
//!
//! A command that is killed between disabling connections and the switch would leave the side that clients are on refusing new
//! sessions, until the next command. A command that is killed after the switch, while it works on the side that clients left,
//! would leave connections to that side enabled. A guardian is another process: it notices that the command is gone (a pipe
//! between them ends) and calls [`repair_interrupted`].
//!
//! ```text
//! Switching, proxy serves the source --> connections enabled, Following    Switching, proxy serves the target --> Switched
//! Returning, proxy serves the target --> target's enabled, source's disabled, Switched           the source --> Returned
//! Returned --> source's connections enabled    Switched --> source's connections disabled        all others --> nothing
//! ```
//!
//! The guardian holds the journal's lock meanwhile: a command that starts waits, and finds one of the states above. A guardian
//! that starts second finds the lock taken, and leaves the work to that command. It drops nothing and begins nothing.

use crate::journal::{Journal, Phase, SharedJournal};
use crate::options::Options;
use crate::switch::{Side, serves};
use crate::{fallback, fence};
use stillpoint_migrate_apply::Error;

/// Enables connections to the side that serves and disables those to the other, if a dead command has left them otherwise. It
/// is harmless at any time and can be repeated; a failure changes nothing, and a retry is possible.
///
/// # Errors
///
/// [`Error::Journal`] if the journal cannot be read or written, [`Error::Proxy`] or [`Error::ProxyGone`] if the proxy
/// does not report which side serves, and errors of the connections to the servers.
pub async fn repair_interrupted(options: &Options) -> Result<(), Error> {
    let Some(mut journal) = Journal::try_open(&options.state, &options.source.database)? else { return Ok(()) };
    let options = &options.recorded_in(&journal.record)?;
    match journal.record.phase {
        Phase::Switching if serves(options, &journal.record, Side::Target).await? => {
            journal.update(|record| record.phase = Phase::Switched)
        }
        Phase::Switching => {
            fence::lift_if_fenced(&options.source, journal.record.fenced.as_ref()).await?;
            journal.update(|record| record.phase = Phase::Following)
        }
        Phase::Returning if serves(options, &journal.record, Side::Source).await? => {
            journal.update(|record| record.phase = Phase::Returned)
        }
        Phase::Returning => fallback::stay_on_target(options, &SharedJournal::new(&mut journal)).await,
        Phase::Returned => fence::lift_if_fenced(&options.source, journal.record.fenced.as_ref()).await.map(drop),
        Phase::Switched => fallback::fence_source(options, &journal.record).await,
        Phase::Begun | Phase::Snapshotted | Phase::Copying | Phase::Following => Ok(()),
    }
}
