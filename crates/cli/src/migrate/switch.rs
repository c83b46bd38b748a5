//! `stillpoint migrate switch`: orders a command that holds to move clients.

use super::servers::{OnServers, REACHABILITY_HINT, Servers, block_on};
use crate::output::{Exit, Failure, Output};
use jiff::{Timestamp, ZonedDateTime};
use serde_json::json;
use std::time::Duration;
use stillpoint_migrate_engine::{Condition, DailyWindow, Options, Phase, SwitchOrder, moment, order_switch, status};

/// Arguments of `stillpoint migrate switch`.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,
    /// Moment before which clients stay: `22:00` (the next one), `2026-12-01 02:00`, or with an offset.
    #[arg(long, value_name = "TIME", value_parser = at)]
    at: Option<Timestamp>,
    /// Part of each day in which clients may move, such as `22:00-04:00`, by this machine's clock.
    #[arg(long, value_name = "A-B", value_parser = str::parse::<DailyWindow>)]
    window: Option<DailyWindow>,
    /// Conditions that must hold, such as `lag<1s and tps<500`. `lag` is the time until a commit is on the target, `tps`
    /// the number of transactions a second.
    #[arg(long, value_name = "CONDITIONS", value_parser = conditions)]
    when: Option<Conditions>,
    /// Only give the order, and do not wait until clients are on the target.
    #[arg(long)]
    no_wait: bool,
}

/// Conditions, as one value of an option.
#[derive(Debug, Clone)]
struct Conditions(Vec<Condition>);

fn at(text: &str) -> Result<Timestamp, String> {
    moment(text, &ZonedDateTime::now())
}

fn conditions(text: &str) -> Result<Conditions, String> {
    Condition::all(text).map(Conditions)
}

/// Number of looks at which no command is at work after which the order counts as lost.
const ABSENT_MAX: u32 = 20;
/// Interval between two looks at the command that holds.
const INTERVAL: Duration = Duration::from_millis(300);

/// Runs `stillpoint migrate switch`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let each = args.each()?;
    // Those that move together wait until the switch of all of them is ordered.
    let ordered = each.iter().map(|args| order(args, output)).collect::<Result<Vec<_>, _>>()?;
    ordered.iter().flatten().try_for_each(|options| wait(options, output))
}

impl OnServers for Args {
    fn servers(&mut self) -> &mut Servers {
        &mut self.servers
    }
}

/// Gives the order; returns the options if the command is to wait until it is carried out.
fn order(args: &Args, output: &Output) -> Result<Option<Options>, Failure> {
    let options = args.servers.options()?;
    let when = args.when.clone().map(|conditions| conditions.0).unwrap_or_default();
    let order = SwitchOrder { at: args.at, window: args.window, when };
    block_on(order_switch(&options, &order))?.map_err(|error| {
        Failure::refused(error).hint("`stillpoint migrate status` shows if a command holds, and why clients stay")
    })?;
    let database = &options.source.database;
    if args.no_wait {
        output.result("ordered", &json!({"database": database, "order": order}));
        output.line(format_args!("{database}: the switch is ordered; `stillpoint migrate status` shows its state"));
        return Ok(None);
    }
    Ok(Some(options))
}

/// Waits until clients are on the target, or the order is not carried out.
fn wait(options: &Options, output: &Output) -> Result<(), Failure> {
    let database = &options.source.database;
    let (mut told, mut absent) = (String::new(), 0);
    loop {
        let status = block_on(status(options))?
            .map_err(|error| Failure::failed(error, "the switch is ordered").hint(REACHABILITY_HINT))?;
        let phase = status.record.as_ref().map(|record| record.phase);
        let gone = |why: &str| {
            let error = anyhow::anyhow!("{database}: {why}");
            let state = "clients are on the source".to_owned();
            Failure { exit: Exit::FellBack, error, state, hint: Some("the output of `run --hold`".into()) }
        };
        absent = if status.holding.is_none() && status.at_work.is_none() { absent + 1 } else { 0 };
        // Without a journal, only the proxy knows where clients are.
        let is_ended = phase.is_none() && status.serving == Some("target");
        match (phase, &status.holding) {
            _ if phase == Some(Phase::Switched) || is_ended => {
                output.result("switched", &json!({"database": database}));
                output.line(format_args!("{database}: clients are on the target"));
                return Ok(());
            }
            (None, _) => return Err(gone("the migration was aborted")),
            (_, Some(holding)) if holding.order.is_none() => return Err(gone(&holding.why_not)),
            (_, Some(holding)) if holding.why_not != told => {
                told.clone_from(&holding.why_not);
                output.note(format_args!("clients stay: {told}"));
            }
            _ if absent > ABSENT_MAX => {
                let error = anyhow::anyhow!("{database}: no command works on the migration any more");
                let state = "`stillpoint migrate status` shows where clients are".to_owned();
                let hint = Some("run --hold, which carries the order out".into());
                return Err(Failure { exit: Exit::Unknown, error, state, hint });
            }
            _ => {}
        }
        std::thread::sleep(INTERVAL);
    }
}
