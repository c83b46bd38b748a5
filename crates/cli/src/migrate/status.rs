//! `stillpoint migrate status`: progress and state of a migration.

use super::servers::{REACH, Servers, quietly};
use crate::output::{Exit, Failure, Output, copied};
use serde::Serialize;
use stillpoint_migrate_engine::{Copying, Phase, Status, status};

/// Arguments of `stillpoint migrate status`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::MIGRATE_STATUS)]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,
}

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    event: &'static str,
    #[serde(flatten)]
    status: &'a Status,
}

/// Runs `stillpoint migrate status`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let options = args.servers.options()?;
    let status =
        quietly(status(&options))?.map_err(|error| Failure::failed(error, "nothing was touched").hint(REACH))?;
    output.json(&Line { v: stillpoint_events::VERSION, event: "migration", status: &status });
    let database = options.source.database_name();
    if let Some(why) = &status.unasked
        && !status.is_known()
    {
        let dir = options.state.display();
        let error = anyhow::anyhow!("{database}: there is no journal in {dir}, and its server cannot be asked: {why}");
        let state = "nothing was touched; whether a migration is under way is not known".into();
        return Err(Failure { exit: Exit::Unknown, error, state, hint: Some(REACH.into()) });
    }
    match &status.record {
        None => match &status.owner {
            Some(owner) => output.line(format_args!(
                "{database}: {owner}, which is not here: commands that are given that journal work on it, \
                 `stillpoint migrate abort --migration {}` removes it where the journal is lost",
                owner.migration
            )),
            None => output.line(format_args!("{database}: no migration")),
        },
        Some(record) => {
            let kept = status.kept_bytes.map_or_else(String::new, |kept| format!(", {kept} bytes of log kept for it"));
            output.line(format_args!(
                "{database}: migration {} from {} to {}: {:?}{kept}",
                record.migration, record.source, record.target, record.phase
            ));
            for (server, copying) in &status.copying {
                let Copying { bytes, bytes_total, bytes_per_s, estimate_s } = *copying;
                let far = copied(bytes, bytes_total, bytes_per_s, estimate_s);
                output.line(format_args!("rows are copied to {server}: {far}"));
            }
            for other in &record.others {
                let server = &other.server;
                let kept = status.kept_for_others.get(server);
                let kept = kept.map_or_else(String::new, |kept| format!(", {kept} bytes of log kept for it"));
                output.line(match &other.dropped {
                    Some(reason) => format!("{server} was dropped: {reason}"),
                    None if record.phase > Phase::Switching => format!("{server} was not needed{kept}"),
                    None if other.is_following() => format!("{server} follows too, and may take its place{kept}"),
                    None => format!("{server} may take its place once it follows{kept}"),
                });
            }
        }
    }
    match status.serving {
        Some(side) => output.line(format_args!("clients are on the {side}")),
        None => output.line("the proxy does not say where clients are"),
    }
    if let Some(who) = &status.at_work {
        output.line(format_args!("a command is at work on it: {who}"));
    }
    if let Some(why) = &status.unasked {
        output.line(format_args!("its server cannot be asked: {why}"));
    }
    if let Some(advice) = status.advice() {
        output.line(advice);
    }
    for what in &status.defined_since {
        output.line(format_args!("`fallback` would drop what was defined on the target since: {what}"));
    }
    for orphan in &status.orphans {
        output.line(format_args!(
            "slot {orphan} belongs to no migration of this journal: `stillpoint migrate abort` drops it"
        ));
    }
    Ok(())
}
