//! What a guardian does when the command that it watches over has died.
//!
//! From the moment when the door is shut until clients have changed sides, a command that is killed would leave the side that
//! clients are on refusing new sessions, until somebody calls the next command; and behind the switch, while a command works on
//! the side that was left, it would leave that side's door open. A guardian is another process, which sees that
//! the command is gone (a pipe between them ends) and calls [`heal`].
//!
//! ```text
//!  Switching, proxy serves the source --> door opened, Following      Switching, proxy serves the target --> Switched
//!  Returning, proxy serves the target --> its door opened, the source's shut, Switched       the source --> Returned
//!  Returned --> the source's door opened       Switched --> the source's door shut           all others --> nothing
//! ```
//!
//! It holds the journal's lock meanwhile: a command that comes waits, and finds one of the states above; a guardian that comes
//! second finds the lock taken, and leaves it to that command. Nothing is dropped here, and nothing begun.

use crate::journal::{Journal, Phase};
use crate::options::Options;
use crate::switch::{Side, serves};
use crate::{Error, back, fence};

/// Opens the door of the side that serves and shuts the other's, should a dead command have left them otherwise. Harmless at any time and as often as one
/// likes; a failure leaves things as they are, and it can be tried again.
pub async fn heal(options: &Options) -> Result<(), Error> {
    let Some(mut journal) = Journal::try_open(&options.state, &options.source.database)? else { return Ok(()) };
    let options = &options.recorded_in(&journal.record)?;
    match journal.record.phase {
        Phase::Switching if serves(options, &journal.record, Side::Target).await? => {
            journal.update(|record| record.phase = Phase::Switched)
        }
        Phase::Switching => {
            fence::lift_if_shut(&options.source, journal.record.fenced.as_ref()).await?;
            journal.update(|record| record.phase = Phase::Following)
        }
        Phase::Returning if serves(options, &journal.record, Side::Source).await? => {
            journal.update(|record| record.phase = Phase::Returned)
        }
        Phase::Returning => back::stay_on_target(options, &mut journal).await,
        Phase::Returned => fence::lift_if_shut(&options.source, journal.record.fenced.as_ref()).await.map(drop),
        Phase::Switched => back::shut_source(options, &journal.record).await,
        Phase::Begun | Phase::Snapshotted | Phase::Copying | Phase::Following => Ok(()),
    }
}
