//! `stillpoint migrate status`: progress and state of a migration.

use super::servers::{OnServers, REACHABILITY_HINT, Servers, block_on};
use crate::output::{Exit, Failure, Output, copied};
use stillpoint_migrate_engine::{CopyProgress, FollowLoad, Phase, status};

/// Arguments of `stillpoint migrate status`.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,
}

/// Runs `stillpoint migrate status`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    args.run_each(output, |args| show(args, output))
}

impl OnServers for Args {
    fn servers(&mut self) -> &mut Servers {
        &mut self.servers
    }
}

fn show(args: &Args, output: &Output) -> Result<(), Failure> {
    let options = args.servers.options()?;
    let status = block_on(status(&options))?
        .map_err(|error| Failure::failed(error, "nothing was touched").hint(REACHABILITY_HINT))?;
    output.result("migration", &status);
    let database = &options.source.database;
    if let Some(why) = &status.unasked
        && !status.is_known()
    {
        let dir = options.state.display();
        let error =
            anyhow::anyhow!("{database}: there is no journal in {dir}, and the source cannot be reached: {why}");
        let state = "nothing was touched; it is not known if a migration is under way".into();
        return Err(Failure { exit: Exit::Unknown, error, state, hint: Some(REACHABILITY_HINT.into()) });
    }
    match &status.record {
        None => match &status.owner {
            Some(owner) => output.line(format_args!(
                "{database}: {owner}, which is not in this directory: run commands with that journal; if it is lost, \
                 `stillpoint migrate abort --migration {}` removes the migration",
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
            if !record.selection.is_all() {
                output.line(format_args!("a part of the database: {}", record.selection));
            }
            for (server, copying) in &status.copying {
                let CopyProgress { bytes, bytes_total, bytes_per_s, estimate_s } = *copying;
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
                    None if other.is_following() => format!("{server} also follows, and may replace it{kept}"),
                    None => format!("{server} may replace it once it follows{kept}"),
                });
            }
        }
    }
    match status.serving {
        Some(side) => output.line(format_args!("clients are on the {side}")),
        None => output.line("the proxy does not report which side serves clients"),
    }
    if let Some(holding) = &status.holding {
        let FollowLoad { lag_s, lag_bytes, tps } = holding.load;
        output.line(format_args!(
            "it is ready, and holds: {:.0} ms and {lag_bytes} bytes behind, {tps:.0} transactions a second; clients stay: {}",
            lag_s * 1e3,
            holding.why_not
        ));
    }
    if let Some(mirror) = &status.mirror {
        let differ = mirror.differing();
        output.line(format_args!(
            "reads are run on the target too: {} of {} statements compared, {differ} with other answers",
            mirror.compared(),
            mirror.seen
        ));
    }
    if let Some(who) = &status.at_work {
        output.line(format_args!("a command is working on it: {who}"));
    }
    if let Some(why) = &status.unasked {
        output.line(format_args!("the server cannot be reached: {why}"));
    }
    if let Some(advice) = status.advice() {
        output.line(advice);
    }
    for what in &status.defined_since {
        output
            .line(format_args!("`fallback` would drop a definition made on the target since the switch-over: {what}"));
    }
    for orphan in &status.orphans {
        output.line(format_args!(
            "slot {orphan} belongs to no migration of this journal: `stillpoint migrate abort` drops it"
        ));
    }
    Ok(())
}
