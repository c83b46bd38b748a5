//! `stillpoint migrate fallback`, `finish` and `abort`: commands that end a migration.

use super::run::MoveArgs;
use super::servers::{
    OnServers, REACHABILITY_HINT, Servers, block_on, failure, first_failure, run_guarded, run_several, run_watched,
};
use crate::output::{Exit, Failure, Output};
use serde_json::json;
use stillpoint_migrate_engine as engine;

/// Arguments of `stillpoint migrate fallback`.
#[derive(Clone, clap::Args)]
pub(crate) struct FallbackArgs {
    #[command(flatten)]
    servers: Servers,
    #[command(flatten)]
    how: MoveArgs,
    /// Drop definitions made on the target since the switch-over, with the target's database: tables with their rows,
    /// indexes, views, rights, and everything else that the command lists without this option.
    #[arg(long)]
    drop_definitions: bool,
    /// Report what would be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Arguments of `stillpoint migrate abort`.
#[derive(Clone, clap::Args)]
pub(crate) struct AbortArgs {
    #[command(flatten)]
    end: EndArgs,
    /// Number of a migration whose journal is lost, as `status` shows it: its objects on the source are removed without
    /// the journal.
    #[arg(long, value_name = "NUMBER")]
    migration: Option<String>,
}

/// Arguments of `stillpoint migrate finish`.
#[derive(Clone, clap::Args)]
pub(crate) struct FinishArgs {
    #[command(flatten)]
    end: EndArgs,
    /// After a migration of a part of the database: enable connections to the source again, for what was left out. The
    /// tables that moved are still there too, as they were at the switch; drop them.
    #[arg(long)]
    reopen_source: bool,
}

/// Arguments that `stillpoint migrate finish` and `abort` share.
#[derive(Clone, clap::Args)]
pub(crate) struct EndArgs {
    #[command(flatten)]
    servers: Servers,
    /// Report what would be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

impl OnServers for FallbackArgs {
    fn servers(&mut self) -> &mut Servers {
        &mut self.servers
    }
}

impl OnServers for FinishArgs {
    fn servers(&mut self) -> &mut Servers {
        &mut self.end.servers
    }
}

impl OnServers for AbortArgs {
    fn servers(&mut self) -> &mut Servers {
        &mut self.end.servers
    }
}

impl FallbackArgs {
    fn options(&self) -> Result<engine::Options, Failure> {
        let mut options = self.servers.options()?;
        self.how.apply(&mut options)?;
        options.accepted.definitions_dropped = self.drop_definitions;
        Ok(options)
    }
}

/// Runs `stillpoint migrate fallback`.
pub(crate) fn fallback(args: &FallbackArgs, output: &Output) -> Result<(), Failure> {
    let each = args.each()?;
    if args.dry_run {
        return args.run_each(output, |args| return_one(args, output));
    }
    let [one] = each.as_slice() else { return return_several(&each, output) };
    return_one(one, output)
}

/// Rolls several databases back, in one pause.
fn return_several(each: &[FallbackArgs], output: &Output) -> Result<(), Failure> {
    let options = each.iter().map(FallbackArgs::options).collect::<Result<Vec<_>, _>>()?;
    let servers: Vec<Servers> = each.iter().map(|args| args.servers.clone()).collect();
    let ended = run_several(&servers, output, async |interrupt, observer| {
        engine::fallback_together(&options, &interrupt, move |event| observer(event)).await
    })?;
    let tell = |(options, ended): (&engine::Options, Result<engine::Outcome, Failure>)| {
        ended.map(|outcome| tell_returned(options, &outcome, output))
    };
    first_failure(options.iter().zip(ended).map(tell), output)
}

fn return_one(args: &FallbackArgs, output: &Output) -> Result<(), Failure> {
    let options = args.options()?;
    if args.dry_run {
        show_dry_run(
            &options,
            output,
            "would replay on the source what was committed on the target, and move clients there",
        )?;
        let lost = block_on(engine::definitions_since_switch(&options))?.map_err(Failure::refused)?;
        for what in &lost {
            output.line(format_args!("would drop: {what}"));
        }
        let refused = !lost.is_empty() && !args.drop_definitions;
        let error =
            || failure(engine::Failure { error: engine::Error::DefinedSince(lost), state: engine::State::Untouched });
        return if refused { Err(error()) } else { Ok(()) };
    }
    let outcome = run_watched(&args.servers, &options, output, |observer| engine::fallback(&options, observer))?;
    tell_returned(&options, &outcome, output);
    Ok(())
}

fn tell_returned(options: &engine::Options, outcome: &engine::Outcome, output: &Output) {
    let database = &options.source.database;
    let paused_us = match outcome {
        engine::Outcome::Switched { paused } => Some(paused.as_micros() as u64),
        engine::Outcome::AlreadyThere => None,
    };
    output.result("returned", &json!({"database": database, "paused_us": paused_us}));
    match paused_us {
        Some(us) => output.line(format_args!(
            "{database}: clients are on the source again, and were paused for {:.1} ms; nothing of the migration is \
             left",
            us as f64 / 1e3
        )),
        None => output.line(format_args!(
            "{database}: clients were already on the source; the remains of the migration were removed"
        )),
    }
}

/// Runs `stillpoint migrate finish`.
pub(crate) fn finish(args: &FinishArgs, output: &Output) -> Result<(), Failure> {
    args.run_each(output, |args| finish_one(args, output))
}

fn finish_one(args: &FinishArgs, output: &Output) -> Result<(), Failure> {
    let FinishArgs { end: args, reopen_source } = args;
    let options = engine::Options { reopen_source: *reopen_source, ..args.servers.options()? };
    let would = "would drop slot, publications and schema of the migration; `fallback` would no longer be possible";
    if args.dry_run {
        let also = if *reopen_source { "; would enable connections to the source" } else { "" };
        return show_dry_run(&options, output, &format!("{would}{also}"));
    }
    run_guarded(&args.servers, || block_on(engine::finish(&options))?.map_err(failure))?;
    let database = &options.source.database;
    output.result("finished", &json!({"database": database, "paused_us": null}));
    let source = match reopen_source {
        true => {
            "connections to the source are enabled again, where the moved tables are as they were at the switch-over"
        }
        false => "the source keeps its rows, and connections to it stay disabled",
    };
    output.line(format_args!("{database}: finished; {source}"));
    Ok(())
}

/// Runs `stillpoint migrate abort`.
pub(crate) fn abort(args: &AbortArgs, output: &Output) -> Result<(), Failure> {
    args.run_each(output, |args| abort_one(args, output))
}

fn abort_one(args: &AbortArgs, output: &Output) -> Result<(), Failure> {
    let mut options = args.end.servers.options()?;
    options.without_journal.clone_from(&args.migration);
    let args = &args.end;
    if args.dry_run {
        return show_dry_run(&options, output, "would drop slots, publications, schema and the target's database");
    }
    let state = block_on(engine::abort(&options))?.map_err(not_aborted)?;
    let database = &options.source.database;
    output.result("aborted", &json!({"database": database, "paused_us": null}));
    output.line(format_args!("{database}: {state}"));
    Ok(())
}

/// Converts a failure of `abort`: once clients are on the target, it tries nothing.
fn not_aborted(failed: engine::Failure) -> Failure {
    match failed.state {
        engine::State::OnTarget | engine::State::OnTargetForGood => Failure { exit: Exit::Refused, ..failure(failed) },
        _ => failure(failed),
    }
}

fn show_dry_run(options: &engine::Options, output: &Output, what: &str) -> Result<(), Failure> {
    let status = block_on(engine::status(options))?.map_err(Failure::refused)?;
    match status.record {
        Some(record) => output.line(format_args!("migration {} ({:?}): {what}", record.migration, record.phase)),
        None if !status.is_known() => {
            let why = status.unasked.unwrap_or_default();
            return Err(Failure::refused(anyhow::anyhow!("cannot find out if there is a migration: {why}"))
                .hint(REACHABILITY_HINT));
        }
        None => match status.owner {
            Some(owner) => {
                output.line(format_args!("{}: {owner}, which is not in this directory", options.source.database))
            }
            None => output.line(format_args!("{}: there is no migration", options.source.database)),
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_that_comes_too_late_is_refused() {
        for (state, exit) in [
            (engine::State::OnTarget, Exit::Refused),
            (engine::State::OnTargetForGood, Exit::Refused),
            (engine::State::OnSourceWithRemains("a slot".into()), Exit::FellBack),
        ] {
            let failed = engine::Failure { error: engine::Error::WrongPhase(String::new()), state };
            assert_eq!(not_aborted(failed).exit, exit);
        }
    }
}
