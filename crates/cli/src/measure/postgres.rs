//! `stillpoint measure postgres` and `stillpoint measure check`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use stillpoint_measure::history::{Anomaly, History, check};
use stillpoint_measure::load::Mix;
use stillpoint_measure::postgres::{Isolation, PostgresFinished, PostgresLoad, PostgresPlan, Work, prepare};

use super::{describe, failure, interrupt_flag, json, seconds, show_progress};
use crate::output::{Failure, Output};

/// Size limit of a history, in bytes.
const HISTORY_MAX: u64 = 4 << 30;
/// Number of anomalies that are printed; the JSON has all.
const ANOMALIES_SHOWN_MAX: usize = 10;

#[derive(Args)]
pub(super) struct PostgresArgs {
    /// Address of the server: `host=... port=... user=... dbname=...`, or a URL.
    #[arg(long, value_name = "CONNINFO")]
    connect: String,
    /// Work of the clients: a shop with the interactions of TPC-W's ordering mix, or data whose history is checked.
    #[arg(long, value_enum, default_value_t = WorkArg::Ordering)]
    work: WorkArg,
    /// Items in the shop; customers are ten times as many.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    items: u32,
    /// Counters and accounts of the checked data.
    #[arg(long, value_name = "N", default_value_t = 8)]
    rows: u32,
    /// Kinds of checked transactions with weights.
    #[arg(long, value_name = "KIND=WEIGHT,...", default_value = "counter=1,transfer=1,list=1")]
    mix: Mix,
    /// Create the tables (`sp_...`) first; existing ones are replaced.
    #[arg(long)]
    prepare: bool,
    /// Clients, each with a connection and a schedule of its own.
    #[arg(long, value_name = "N", default_value_t = 100)]
    clients: u32,
    /// Mean seconds of think time of a client. It runs from due time to due time, whether or not answers come.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    think: Duration,
    /// Isolation level of the transactions.
    #[arg(long, value_enum, default_value_t = Isolation::RepeatableRead)]
    isolation: Isolation,
    /// Seconds for which transactions become due.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    duration: Duration,
    /// Seconds after which a transaction that is not done has failed.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    timeout: Duration,
    /// Seed of all random choices.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Record every transaction in this file, for `stillpoint measure report`.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Write all operations of the clients of checked data, and their results, to this file, for `stillpoint measure check`.
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// Exit with 1 when a transaction failed, a connection was dropped or the history has an anomaly.
    #[arg(long)]
    strict: bool,
}

#[derive(Args)]
pub(super) struct CheckArgs {
    /// A history, as `stillpoint measure postgres --history` writes it.
    history: PathBuf,
    /// Isolation level that the database promises.
    #[arg(long, value_enum, default_value_t = Isolation::RepeatableRead)]
    isolation: Isolation,
}

#[derive(Clone, Copy, ValueEnum)]
enum WorkArg {
    Ordering,
    Checked,
}

pub(super) fn run(args: PostgresArgs, output: &Output) -> Result<(), Failure> {
    let plan = PostgresPlan {
        connect: args.connect,
        work: match args.work {
            WorkArg::Ordering => Work::Ordering { items: args.items },
            WorkArg::Checked => Work::Checked { mix: args.mix, rows: args.rows },
        },
        clients: args.clients,
        think: args.think,
        isolation: args.isolation,
        duration: args.duration,
        timeout: args.timeout,
        seed: args.seed,
        record: args.record,
        history: args.history,
    };
    let interrupt_flag = interrupt_flag()?;
    if args.prepare {
        output.progress("making the tables");
        prepare(&plan).map_err(failure)?;
    }
    let load = PostgresLoad::start(plan).map_err(failure)?;
    show_progress(load.counters(), || load.is_finished(), &interrupt_flag, output);
    let finished = load.wait().map_err(failure)?;
    output.progress_done();
    show(&finished, output);
    json(output, "measured", &finished);
    if args.strict && !finished.is_clean() {
        let problem = "not every transaction was answered rightly on a connection that stayed open";
        return Err(Failure::failed(anyhow::anyhow!(problem), "the load has ended"));
    }
    Ok(())
}

fn show(finished: &PostgresFinished, output: &Output) {
    output.lines(describe(&finished.finished));
    output.line(format!("retried after a serialization failure or a deadlock: {}", finished.retries));
    if let Some(verdict) = &finished.verdict {
        output.line(format!(
            "history: {} transactions, {} committed, {} of unknown end, {} anomalies",
            verdict.transactions,
            verdict.committed,
            verdict.unknown,
            verdict.anomalies.len()
        ));
        show_anomalies(&verdict.anomalies, output);
    }
}

fn show_anomalies(anomalies: &[Anomaly], output: &Output) {
    for anomaly in anomalies.iter().take(ANOMALIES_SHOWN_MAX) {
        output.line(format!("  {anomaly}"));
    }
    if anomalies.len() > ANOMALIES_SHOWN_MAX {
        output.line(format!("  and {} more", anomalies.len() - ANOMALIES_SHOWN_MAX));
    }
}

pub(super) fn run_check(args: CheckArgs, output: &Output) -> Result<(), Failure> {
    let text = stillpoint_host::file::read_named_text(&args.history, HISTORY_MAX).map_err(Failure::refused)?;
    let history = History::from_lines(&text)
        .map_err(|problem| Failure::refused(anyhow::anyhow!("{}: {problem}", args.history.display())))?;
    let anomalies = check(&history, args.isolation.level());
    output.line(format!(
        "{}: {} transactions, {} anomalies",
        args.history.display(),
        history.transactions.len(),
        anomalies.len()
    ));
    show_anomalies(&anomalies, output);
    json(output, "checked", &serde_json::json!({ "transactions": history.transactions.len(), "anomalies": anomalies }));
    if anomalies.is_empty() {
        return Ok(());
    }
    let problem = format!("the history has {} anomalies", anomalies.len());
    Err(Failure::failed(anyhow::anyhow!(problem), "only the file was read"))
}
