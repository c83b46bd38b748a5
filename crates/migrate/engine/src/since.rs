//! What was defined on the target since clients went there: the way back would drop it, as it repeats rows alone.
//!
//! The definitions at the switch lie beside the journal.

use crate::catalogs::{self, Definitions};
use crate::journal::{self, Phase, Record};
use crate::link::{Link, Purpose};
use crate::{Error, Options};

/// Definitions of this migration's target, as it is now, that the way back would not bring to the source, for people.
pub(crate) fn the_switch(options: &Options, now: &Definitions) -> Result<Vec<String>, Error> {
    let Some(then) = journal::definitions(&options.state, &options.source.database)? else {
        return Ok(vec!["whatever it was: the journal does not tell what there was at the switch".into()]);
    };
    Ok(catalogs::made_since(&then, now))
}

/// The same where there is a way back; nothing otherwise.
pub(crate) async fn defined(options: &Options, record: &Record) -> Result<Vec<String>, Error> {
    if !record.way_back || !matches!(record.phase, Phase::Switched | Phase::Returning) {
        return Ok(Vec::new());
    }
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    the_switch(options, &catalogs::read(&mut target).await?)
}

/// What was defined, changed or dropped on the target since clients went there: [`crate::fallback`] refuses to drop it, unless
/// [`crate::Accepted::definitions_dropped`]. Nothing where there is no way back.
pub async fn defined_since(options: &Options) -> Result<Vec<String>, Error> {
    let options = &options.recorded()?;
    match journal::peek(&options.state, &options.source.database)? {
        Some(record) => defined(options, &record).await,
        None => Ok(Vec::new()),
    }
}
