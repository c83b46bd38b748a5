//! Definitions made on the target since clients went there. The way back would lose them, because it repeats only rows.
//!
//! The definitions at the switch are stored beside the journal.

use crate::Options;
use crate::Selection;
use crate::catalogs::{self, Definitions};
use crate::journal::{Phase, Record};
use crate::state_files;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Link, Purpose};

/// Returns definitions now on this migration's target that the way back would not bring to the source, as messages.
pub(crate) fn since_switch(options: &Options, now: &Definitions) -> Result<Vec<String>, Error> {
    let Some(then) = state_files::definitions(&options.state, &options.source.database)? else {
        return Ok(vec!["unknown definitions: the journal has no record of the definitions at the switch-over".into()]);
    };
    Ok(catalogs::changes_since(&then, now))
}

/// Returns the same if there is a way back, and nothing otherwise.
pub(crate) async fn changes_of(options: &Options, record: &Record) -> Result<Vec<String>, Error> {
    if !record.way_back || !matches!(record.phase, Phase::Switched | Phase::Returning) {
        return Ok(Vec::new());
    }
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    since_switch(options, &catalogs::read(&mut target, &Selection::default()).await?)
}

/// Returns what was defined, changed or dropped on the target since clients went there. [`crate::fallback`] refuses to lose it,
/// unless [`crate::AcceptedRestrictions::definitions_dropped`]. Empty if there is no way back.
///
/// # Errors
///
/// [`Error::Journal`] if the journal cannot be read, and errors of the connection to the target.
pub async fn definitions_since_switch(options: &Options) -> Result<Vec<String>, Error> {
    let options = &options.recorded()?;
    match state_files::peek(&options.state, &options.source.database)? {
        Some(record) => changes_of(options, &record).await,
        None => Ok(Vec::new()),
    }
}
