//! Clean-up after the switch.

use crate::fence;
use crate::journal::{Capture, Journal, SharedJournal};
use crate::materialized_views::refresh_stale;
use crate::options::Options;
use crate::progress::Reporter;
use crate::reactions::complete_foreign_keys;
use crate::removal::remove_others;
use stillpoint_migrate_apply::{Error, replication_objects};
use stillpoint_migrate_postgres::link::{Link, Purpose};

/// Cleans up after the switch: closes the way out, opens the way back, and restores the other targets.
pub(crate) async fn settle(
    options: &Options,
    journal: &SharedJournal<'_>,
    left: Option<Link>,
    reporter: &Reporter,
) -> Result<(), Error> {
    fence::end_background_sessions(&options.target).await?;
    let mut source = match left {
        Some(link) => link,
        None => fence::connect_to_fenced(&options.source).await?,
    };
    let record = journal.record();
    if record.way_back {
        replication_objects::install(&mut source, record.back_from).await?;
    }
    replication_objects::withdraw(&mut source).await?;
    remove_others(options, journal, &mut source).await?.into_iter().for_each(|left| reporter.warn(left));
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    let failed = complete_foreign_keys(&mut source, &mut target, &record.selection).await?;
    failed.into_iter().for_each(|key| reporter.warn(key));
    refresh_stale(&mut source, &options.target, &record.selection, &record.refreshed, reporter).await;
    // This comes last: it records that everything before is done.
    replication_objects::drop_slot(&mut source, &record.slot()).await?;
    journal.lock().update(|record| record.settled = true)
}

/// Completes [`settle`] if it was interrupted: the slot on the source shows that, or the journal if there is no slot.
pub(crate) async fn resume_settle(options: &Options, reporter: &Reporter) -> Result<(), Error> {
    let mut journal = Journal::open(&options.state, &options.source.database)?;
    let settled = match journal.record.capture {
        Capture::Rows | Capture::Statements => journal.record.settled,
        Capture::Log => {
            let mut beside = fence::connect_beside(&options.source).await?;
            let slots = replication_objects::our_slots(&mut beside, &options.source.database).await?;
            !slots.contains(&journal.record.slot())
        }
    };
    if settled { Ok(()) } else { settle(options, &SharedJournal::new(&mut journal), None, reporter).await }
}
