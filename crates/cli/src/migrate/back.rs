//! `stillpoint migrate fallback`, `finish` and `abort`: commands that end a migration.

use super::run::How;
use super::servers::{REACH, Servers, failure, guarded, quietly, watched};
use crate::output::{Failure, Output};
use serde::Serialize;
use stillpoint_migrate_engine as engine;

/// Arguments of `stillpoint migrate fallback`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::MIGRATE_FALLBACK)]
pub(crate) struct FallbackArgs {
    #[command(flatten)]
    servers: Servers,
    #[command(flatten)]
    how: How,
    /// Drop, with the target's database, what was defined there since the switch: tables with their rows, indexes, views,
    /// rights and whatever else is named without this.
    #[arg(long)]
    drop_definitions: bool,
    /// Tell what would be done.
    #[arg(long)]
    dry_run: bool,
}

/// Arguments of `stillpoint migrate abort`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::MIGRATE_ABORT)]
pub(crate) struct AbortArgs {
    #[command(flatten)]
    end: EndArgs,
    /// Number of a migration whose journal is lost, as `status` tells: what it left on the source is removed without.
    #[arg(long, value_name = "NUMBER")]
    migration: Option<String>,
}

/// Arguments of `stillpoint migrate finish`, and of `abort`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::MIGRATE_FINISH)]
pub(crate) struct EndArgs {
    #[command(flatten)]
    servers: Servers,
    /// Tell what would be done.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    event: &'static str,
    database: &'a str,
    paused_us: Option<u64>,
}

/// Runs `stillpoint migrate fallback`.
pub(crate) fn fallback(args: &FallbackArgs, output: &Output) -> Result<(), Failure> {
    let mut options = args.servers.options()?;
    args.how.apply(&mut options)?;
    options.accepted.definitions_dropped = args.drop_definitions;
    if args.dry_run {
        dry(
            &options,
            output,
            "what was committed on the target would be repeated on the source, and clients sent there",
        )?;
        let lost = quietly(engine::defined_since(&options))?.map_err(Failure::refused)?;
        for what in &lost {
            output.line(format_args!("would be dropped: {what}"));
        }
        let refused = !lost.is_empty() && !args.drop_definitions;
        let error =
            || failure(engine::Failure { error: engine::Error::DefinedSince(lost), state: engine::State::Untouched });
        return if refused { Err(error()) } else { Ok(()) };
    }
    let outcome = watched(&args.servers, &options, output, |observer| engine::fallback(&options, observer))?;
    let database = options.source.database_name();
    let paused_us = match outcome {
        engine::Outcome::Switched { paused } => Some(paused.as_micros() as u64),
        engine::Outcome::AlreadyThere => None,
    };
    output.json(&Line { v: stillpoint_events::VERSION, event: "returned", database, paused_us });
    match paused_us {
        Some(us) => output.line(format_args!(
            "{database}: clients are on the source again; they were paused for {:.1} ms, nothing of the migration is left",
            us as f64 / 1e3
        )),
        None => output.line(format_args!(
            "{database}: clients were on the source already; what was left of the migration is gone"
        )),
    }
    Ok(())
}

/// Runs `stillpoint migrate finish`.
pub(crate) fn finish(args: &EndArgs, output: &Output) -> Result<(), Failure> {
    let options = args.servers.options()?;
    if args.dry_run {
        return dry(&options, output, "slot, publications and schema of the migration would be dropped: no way back");
    }
    guarded(&args.servers, || quietly(engine::finish(&options))?.map_err(failure))?;
    let database = options.source.database_name();
    output.json(&Line { v: stillpoint_events::VERSION, event: "finished", database, paused_us: None });
    output.line(format_args!("{database}: finished; the source keeps its rows and stays shut"));
    Ok(())
}

/// Runs `stillpoint migrate abort`.
pub(crate) fn abort(args: &AbortArgs, output: &Output) -> Result<(), Failure> {
    let mut options = args.end.servers.options()?;
    options.without_journal.clone_from(&args.migration);
    let args = &args.end;
    if args.dry_run {
        return dry(&options, output, "slots, publications, schema and the target's database would be dropped");
    }
    let state = quietly(engine::abort(&options))?.map_err(failure)?;
    let database = options.source.database_name();
    output.json(&Line { v: stillpoint_events::VERSION, event: "aborted", database, paused_us: None });
    output.line(format_args!("{database}: {state}"));
    Ok(())
}

fn dry(options: &engine::Options, output: &Output, what: &str) -> Result<(), Failure> {
    let status = quietly(engine::status(options))?.map_err(Failure::refused)?;
    match status.record {
        Some(record) => output.line(format_args!("migration {} ({:?}): {what}", record.migration, record.phase)),
        None if !status.is_known() => {
            let why = status.unasked.unwrap_or_default();
            return Err(
                Failure::refused(anyhow::anyhow!("whether there is a migration is not known: {why}")).hint(REACH)
            );
        }
        None => match status.owner {
            Some(owner) => output.line(format_args!("{}: {owner}, which is not here", options.source.database_name())),
            None => output.line(format_args!("{}: there is no migration", options.source.database_name())),
        },
    }
    Ok(())
}
