//! `stillpoint migrate mirror`: a share of clients' reads on a target that follows, compared with the source.

use super::run::read_passwords;
use super::servers::{OnServers, REACHABILITY_HINT, Servers};
use crate::output::{Exit, Failure, Output};
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stillpoint_migrate_engine::{DifferenceKind, FollowLoad, MirrorReport, MirrorShare, mirror};
use tokio::signal::unix::{SignalKind, signal};

/// Arguments of `stillpoint migrate mirror`.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,
    /// Share of the statements that are run again on both servers, if they only read: `5%`, `0.5%`, `100%`.
    #[arg(long, value_parser = percentage, default_value = "1%", value_name = "PERCENT")]
    share: u32,
    /// Time until the result; Ctrl-C ends it earlier.
    #[arg(long = "for", value_parser = crate::patch::duration, default_value = "10m", value_name = "TIME")]
    time: Duration,
    /// Number of statements that run at the same time; each takes a connection to both servers.
    #[arg(long, default_value_t = 4, value_name = "N")]
    workers: u32,
    /// Largest number of statements with different answers, or that only the target refuses, with which the result is good.
    #[arg(long, default_value_t = 0, value_name = "N")]
    max_different: u64,
    /// Factor by which the target may be slower than the source, in the median and at 95 %, with a good result.
    #[arg(long, default_value_t = 2.0, value_name = "FACTOR")]
    max_slower: f64,
    /// File with lines `ROLE PASSWORD`, as for `run`.
    #[arg(long, value_name = "FILE")]
    client_passwords: Option<PathBuf>,
}

/// Durations below this are not judged: they are those of the network and the scheduler.
const JUDGED_US_MIN: u64 = 1000;
/// Number of statements that durations are judged by.
const JUDGED_STATEMENTS_MIN: u64 = 100;
/// Interval of lines about the progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Parses a percentage into millionths.
fn percentage(text: &str) -> Result<u32, String> {
    let wrong = || format!("`{text}` is not a percentage such as 5% or 0.5%");
    let number: f64 = text.trim().trim_end_matches('%').trim_end().parse().map_err(|_| wrong())?;
    let ppm = (number * 1e4).round();
    if (1.0..=1e6).contains(&ppm) { Ok(ppm as u32) } else { Err(wrong()) }
}

impl OnServers for Args {
    fn servers(&mut self) -> &mut Servers {
        &mut self.servers
    }
}

/// Runs `stillpoint migrate mirror`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    args.run_each(output, |args| compare(args, output))
}

fn compare(args: &Args, output: &Output) -> Result<(), Failure> {
    let is_valid = (1..=32).contains(&args.workers) && args.max_slower.is_finite() && args.max_slower > 0.0;
    if !is_valid {
        return Err(Failure::usage("--workers must be 1 to 32, --max-slower above 0"));
    }
    let mut options = args.servers.options()?;
    if let Some(path) = &args.client_passwords {
        options.client_passwords = read_passwords(path)?;
    }
    let share = MirrorShare { ppm: args.share, workers: args.workers };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::refused)?;
    let begun = Instant::now();
    let mut shown = begun;
    let outcome = runtime.block_on(async {
        let [mut interrupted, mut terminated] = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
        let end = async {
            tokio::select! {
                () = tokio::time::sleep(args.time) => {}
                _ = interrupted.recv() => {}
                _ = terminated.recv() => {}
            }
        };
        let outcome = mirror(&options, share, end, |report, load| {
            if output.has_progress() || shown.elapsed() >= PROGRESS_INTERVAL {
                shown = Instant::now();
                output.progress_line(begun.elapsed(), progress(report, load));
            }
        });
        Ok::<_, std::io::Error>(outcome.await)
    });
    output.progress_done();
    let outcome = outcome.map_err(Failure::refused)?;
    let outcome = outcome.map_err(|error| {
        let state = "clients are where they were; nothing of a mirror stays";
        if error.is_refusal() {
            Failure::refused(error).hint("`stillpoint migrate status` shows if the target follows")
        } else {
            Failure::failed(error, state).hint(REACHABILITY_HINT)
        }
    })?;
    let database = &options.source.database;
    let against = reasons_against(&outcome.report, args);
    let fields = json!({"database": database, "report": outcome.report, "ended": outcome.ended, "against": against});
    output.result("mirror", &fields);
    show(&outcome.report, output);
    if let Some(why) = &outcome.ended {
        output.line(format_args!("ended before its time: {why}"));
    }
    if against.is_empty() {
        output.line(format_args!("{database}: the target answers as the source does"));
        return Ok(());
    }
    let error = anyhow::anyhow!("{database}: {}", against.join("; "));
    let state = "clients are on the source, and nothing was changed".into();
    let hint = "stillpoint migrate mirror --json lists each statement and each reason".to_owned();
    Err(Failure { exit: Exit::Failed, error, state, hint: Some(hint) })
}

fn progress(report: &MirrorReport, load: Option<FollowLoad>) -> String {
    let behind = load.map_or_else(String::new, |load| format!("; the target is {:.0} ms behind", load.lag_s * 1e3));
    format!("{} statements compared, {} with other answers{behind}", report.compared(), report.differing())
}

/// Reasons why the result is not good.
fn reasons_against(report: &MirrorReport, args: &Args) -> Vec<String> {
    let mut against = Vec::new();
    if report.compared() == 0 {
        against.push("no statement was compared".to_owned());
    }
    let differ = report.differing();
    if differ > args.max_different {
        against.push(format!("{differ} statements have other answers on the target (limit {})", args.max_different));
    }
    if report.compared() < JUDGED_STATEMENTS_MIN {
        return against;
    }
    for (name, share) in [("in the median", 0.5), ("at 95 %", 0.95)] {
        let Some((source, target)) = report.quantiles_us(share) else { continue };
        let factor = target as f64 / source.max(1) as f64;
        if factor > args.max_slower && target >= JUDGED_US_MIN {
            against.push(format!(
                "the target is {factor:.1} times slower {name}: {} instead of {} (limit {})",
                milliseconds(target),
                milliseconds(source),
                args.max_slower
            ));
        }
    }
    against
}

fn milliseconds(us: u64) -> String {
    format!("{:.1} ms", us as f64 / 1e3)
}

fn show(report: &MirrorReport, output: &Output) {
    let MirrorReport { seen, drawn, equal, reordered, undefined, unsettled, different, failed, .. } = report;
    output.line(format_args!(
        "statements of clients: {seen}; drawn: {drawn}; run on both servers: {}",
        report.compared()
    ));
    output.line(format_args!("same answer: {equal}; other answer: {different}; refused by the target only: {failed}"));
    if reordered + undefined + unsettled > 0 {
        output.line(format_args!(
            "same rows in another order: {reordered}; other rows where the order is not stated: {undefined}; \
             the source's own answer kept changing: {unsettled}"
        ));
    }
    for (name, share) in [("median", 0.5), ("95 %", 0.95), ("99 %", 0.99)] {
        if let Some((source, target)) = report.quantiles_us(share) {
            let (source, target) = (milliseconds(source), milliseconds(target));
            output.line(format_args!("{name}: below {source} on the source, {target} on the target"));
        }
    }
    for (why, count) in &report.left_out {
        output.line(format_args!("not compared: {count}: {why}"));
    }
    for difference in &report.differences {
        let what = match difference.kind {
            DifferenceKind::Different => "other answer",
            DifferenceKind::Failed => "refused by the target only",
            DifferenceKind::Reordered => "same rows in another order",
            DifferenceKind::Undefined => "other rows, of an order that is not stated",
        };
        output.line(format_args!(
            "{what}, {} times, {} on the source, {} on the target, of {}: {}",
            difference.count, difference.source, difference.target, difference.user, difference.statement
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_percentage() {
        for (text, ppm) in [("1%", 10_000), ("0.01 %", 100), ("100", 1_000_000), ("0.0001%", 1)] {
            assert_eq!(percentage(text), Ok(ppm), "{text}");
        }
        for text in ["", "%", "0", "101%", "-1%", "nan", "1%%x", "inf"] {
            assert!(percentage(text).is_err(), "{text}");
        }
    }
}
