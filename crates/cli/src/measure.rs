//! `stillpoint measure`: load a server, record every latency, and report.

mod postgres;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use serde::Serialize;
use stillpoint_host::file::write_named;
use stillpoint_host::text::one_line;
use stillpoint_measure::compare::compare;
use stillpoint_measure::load::{Arrivals, Counters, Finished, Load, Mix, Plan, Protocol, Snapshot, Target, fill};
use stillpoint_measure::record::Record;
use stillpoint_measure::report::Report;
use stillpoint_measure::summary::{Latency, Summary};
use stillpoint_measure::timeline::Timeline;

use crate::output::{Failure, Output, ResultLine};

/// Version of the JSON objects printed by this command.
const JSON_VERSION: u32 = 1;

/// Arguments of `stillpoint measure`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Load a Redis server: reads, writes, scripts, blocking pops; every answer is checked.
    Redis(RedisArgs),
    /// Load a memcached server (text protocol); every answer is checked.
    Memcached(MemcachedArgs),
    /// Load an echo server over TCP.
    Tcp(TcpArgs),
    /// Probe a server with GET requests over HTTP/1.1.
    Http(HttpArgs),
    /// Load a PostgreSQL server: a shop's ordering mix, or data whose history is checked for anomalies.
    Postgres(postgres::PostgresArgs),
    /// Check a recorded history for anomalies that an isolation level forbids.
    Check(postgres::CheckArgs),
    /// Fill the key space of a server, pipelined.
    Load(LoadArgs),
    /// Write a page with latencies and errors of the clients before, during and after each operation.
    Report(ReportArgs),
    /// Print the ratios of the second record to the first.
    Compare(CompareArgs),
}

/// Address of the server.
#[derive(ClapArgs)]
struct TargetArgs {
    /// Address of the server.
    #[arg(long, value_name = "HOST:PORT", required_unless_present = "socket", conflicts_with = "socket")]
    addr: Option<String>,
    /// Unix socket of the server.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Rate and duration of the load.
#[derive(ClapArgs)]
struct LoopArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Connections that carry requests.
    #[arg(long, value_name = "N", default_value_t = 50)]
    connections: u32,
    /// Requests a second. They are sent by schedule, whether or not answers come (open loop).
    #[arg(long, value_name = "R", default_value_t = 10_000.0)]
    rate: f64,
    /// Distribution of the times between requests.
    #[arg(long, value_enum, default_value_t = Arrivals::Poisson)]
    arrivals: Arrivals,
    /// Maximum number of requests in progress on one connection; others wait, and the wait counts as latency [default: 16; http: 1].
    #[arg(long, value_name = "P")]
    pipeline: Option<u32>,
    /// Idle connections; at the end a request on each shows whether it is alive.
    #[arg(long, value_name = "N", default_value_t = 0)]
    idle: u32,
    /// Seconds for which requests are sent.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    duration: Duration,
    /// Seconds after which a request that has no answer has failed.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    timeout: Duration,
    /// Microseconds before a due time at which sleeping ends and polling begins.
    #[arg(long, value_name = "US", default_value_t = 20)]
    spin_us: u64,
    /// Seed of all random choices.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Record every request in this file, for `stillpoint measure report`.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Exit with 1 when a request failed or a connection was dropped.
    #[arg(long)]
    strict: bool,
}

/// Key space.
#[derive(ClapArgs)]
struct KeyArgs {
    /// Keys in the key space.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    keys: u64,
    /// Bytes of a value.
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    value_bytes: u32,
}

#[derive(ClapArgs)]
struct RedisArgs {
    #[command(flatten)]
    run: LoopArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// Kinds of requests with weights: get, set, lua, blpop, incr, ping.
    #[arg(long, value_name = "KIND=WEIGHT,...", default_value = "get=70,set=30")]
    mix: Mix,
    /// Connections blocked in BLPOP. With `blpop` in the mix a feeder pushes to them, and the time from the due push
    /// to the pop is measured; without it they block to the end and are then fed once to see whether they live.
    #[arg(long, value_name = "N", default_value_t = 0)]
    blocking: u32,
}

#[derive(ClapArgs)]
struct MemcachedArgs {
    #[command(flatten)]
    run: LoopArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// Kinds of requests with weights: get, set, version.
    #[arg(long, value_name = "KIND=WEIGHT,...", default_value = "get=90,set=10")]
    mix: Mix,
}

#[derive(ClapArgs)]
struct TcpArgs {
    #[command(flatten)]
    run: LoopArgs,
    /// Bytes of a message.
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    value_bytes: u32,
}

#[derive(ClapArgs)]
struct HttpArgs {
    #[command(flatten)]
    run: LoopArgs,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
}

#[derive(ClapArgs)]
struct LoadArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// Protocol of the server.
    #[arg(long, value_enum, default_value_t = ProtocolArg::Redis)]
    protocol: ProtocolArg,
}

#[derive(ClapArgs)]
struct ReportArgs {
    /// Records of the run, one for each load generator.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    record: Vec<PathBuf>,
    /// Output of `stillpoint --json patch ...` during the run.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    events: Vec<PathBuf>,
    /// Path of the page, one HTML file that needs no network.
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

#[derive(ClapArgs)]
struct CompareArgs {
    /// First record, with which the second one is compared.
    a: PathBuf,
    /// Second record.
    b: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum ProtocolArg {
    Redis,
    Memcached,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.trim_end_matches('s').parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

impl TargetArgs {
    fn target(self) -> Target {
        match (self.addr, self.socket) {
            (_, Some(path)) => Target::Unix(path),
            (addr, None) => Target::Tcp(addr.unwrap_or_default()),
        }
    }
}

impl LoopArgs {
    fn plan(self, protocol: Protocol) -> Plan {
        // Few HTTP servers accept a request before the previous one is answered.
        let pipeline = self.pipeline.unwrap_or(if matches!(protocol, Protocol::Http { .. }) { 1 } else { 16 });
        Plan {
            connections: self.connections,
            idle: self.idle,
            pipeline,
            rate: self.rate,
            arrivals: self.arrivals,
            duration: self.duration,
            timeout: self.timeout,
            spin: Duration::from_micros(self.spin_us),
            seed: self.seed,
            record: self.record,
            ..Plan::new(self.target.target(), protocol)
        }
    }
}

/// Runs `stillpoint measure`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    match args.command {
        Command::Redis(args) => {
            let protocol = Protocol::Redis { mix: args.mix, keys: args.keys.keys, value_bytes: args.keys.value_bytes };
            run_load(args.run, protocol, args.blocking, output)
        }
        Command::Memcached(args) => {
            let protocol =
                Protocol::Memcached { mix: args.mix, keys: args.keys.keys, value_bytes: args.keys.value_bytes };
            run_load(args.run, protocol, 0, output)
        }
        Command::Tcp(args) => run_load(args.run, Protocol::Tcp { value_bytes: args.value_bytes }, 0, output),
        Command::Http(args) => run_load(args.run, Protocol::Http { path: args.path }, 0, output),
        Command::Postgres(args) => postgres::run(args, output),
        Command::Check(args) => postgres::run_check(args, output),
        Command::Load(args) => run_fill(args, output),
        Command::Report(args) => run_report(args, output),
        Command::Compare(args) => run_compare(args, output),
    }
}

fn json<T: Serialize>(output: &Output, event: &'static str, fields: &T) {
    output.json(&ResultLine { v: JSON_VERSION, event, fields });
}

fn run_fill(args: LoadArgs, output: &Output) -> Result<(), Failure> {
    let KeyArgs { keys, value_bytes } = args.keys;
    // The kinds of a mix do not matter for filling.
    let mix = Mix(Vec::new());
    let protocol = match args.protocol {
        ProtocolArg::Redis => Protocol::Redis { mix, keys, value_bytes },
        ProtocolArg::Memcached => Protocol::Memcached { mix, keys, value_bytes },
    };
    let target = args.target.target();
    let progress = |done| output.progress(&format!("{done} of {keys} keys"));
    let filled = fill(&target, &protocol, progress).map_err(failure)?;
    output.progress_done();
    output.line(format!(
        "{} keys of {value_bytes} bytes stored in {target} in {:.2} s ({:.0} a second)",
        filled.keys,
        filled.seconds,
        filled.keys as f64 / filled.seconds.max(1e-9)
    ));
    json(output, "filled", &filled);
    Ok(())
}

/// Becomes true at the first signal that asks for the end; the second one terminates the program as usual.
fn interrupt_flag() -> Result<Arc<AtomicBool>, Failure> {
    let interrupt_flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&interrupt_flag))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&interrupt_flag)))
            .map_err(|error| Failure::failed(error, "nothing was measured"))?;
    }
    Ok(interrupt_flag)
}

/// Shows the progress of a load until it has ended; after an interrupt no more requests become due.
fn show_progress(counters: &Counters, is_finished: impl Fn() -> bool, interrupt_flag: &AtomicBool, output: &Output) {
    while !is_finished() {
        if interrupt_flag.load(Ordering::Relaxed) {
            counters.stop();
        }
        output.progress(&progress_line(&counters.snapshot()));
        sleep(Duration::from_millis(50));
    }
}

fn run_load(args: LoopArgs, protocol: Protocol, blocking: u32, output: &Output) -> Result<(), Failure> {
    let strict = args.strict;
    let plan = Plan { blocking, ..args.plan(protocol) };
    let interrupt_flag = interrupt_flag()?;
    let load = Load::start(plan).map_err(failure)?;
    show_progress(load.counters(), || load.is_finished(), &interrupt_flag, output);
    let finished = load.wait().map_err(failure)?;
    output.progress_done();
    output.lines(describe(&finished));
    json(output, "measured", &finished);
    if strict && !finished.is_clean() {
        let problem = "not every request was answered rightly on a connection that stayed open";
        return Err(Failure::failed(anyhow::anyhow!(problem), "the load has ended"));
    }
    Ok(())
}

fn run_report(args: ReportArgs, output: &Output) -> Result<(), Failure> {
    output.progress("reading");
    let records =
        args.record.iter().map(|path| Record::open(path)).collect::<Result<Vec<_>, _>>().map_err(Failure::refused)?;
    let timeline = Timeline::open(&args.events).map_err(Failure::refused)?;
    let other_lines = timeline.other_lines;
    let report = Report::of(records, timeline).map_err(Failure::refused)?;
    output.progress_done();
    write_named(&args.output, report.html().as_bytes())
        .map_err(|error| Failure::failed(error, "the records are as they were"))?;
    if report.ends.iter().any(Option::is_none) {
        output.warn("a record is cut off: its load generator did not end in order; everything before is shown");
    }
    let counts = report.summary.counts;
    output.line(format!(
        "{}: {} requests, {} failed, {} connections dropped, {} operations",
        args.output.display(),
        counts.requests,
        counts.failed(),
        report.dropped,
        report.operations.len()
    ));
    if let Some(ratio) = report.p999_ratio() {
        let (during, outside) = (report.during.latency.p999_ns, report.outside.latency.p999_ns);
        output.line(format!("p99.9 during operations {}, otherwise {}: {ratio:.2} times", time(during), time(outside)));
    }
    if other_lines > 0 {
        output.line(format!("{other_lines} lines of the event files are not events and were skipped"));
    }
    json(output, "report", &report);
    Ok(())
}

fn run_compare(args: CompareArgs, output: &Output) -> Result<(), Failure> {
    let summary =
        |path: &PathBuf| Record::open(path).map(|record| Summary::of_record(&record)).map_err(Failure::refused);
    let comparison = compare(summary(&args.a)?, summary(&args.b)?);
    output.line(format!("{:<12}{:>14}{:>14}{:>10}", "", args.a.display(), args.b.display(), "ratio"));
    for row in &comparison.rows {
        let show = |value: f64| if row.figure == "throughput" { format!("{value:.0}/s") } else { time(value as u64) };
        let ratio = row.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.3}"));
        output.line(format!("{:<12}{:>14}{:>14}{ratio:>10}", row.figure, show(row.a), show(row.b)));
    }
    json(output, "compared", &comparison);
    Ok(())
}

/// Failure for a file that cannot be used.
/// Converts an error: a measurement changes nothing in the service except its own keys.
fn failure(error: stillpoint_measure::Error) -> Failure {
    match error {
        stillpoint_measure::Error::Plan { .. } => Failure::usage(error),
        error => Failure::failed(error, "the service was only measured; nothing in it was changed"),
    }
}

fn progress_line(now: &Snapshot) -> String {
    let counts = now.counts;
    format!("{} requests, {} failed, {} connections dropped", counts.requests, counts.failed(), now.dropped)
}

/// Result as text.
fn describe(finished: &Finished) -> String {
    let (header, summary, end) = (&finished.header, &finished.summary, &finished.end);
    let mut text = format!(
        "{} at {}: {:.1} s, {} connections, {} requests a second wanted ({}), {:.0} answered\n",
        header.protocol,
        header.target,
        summary.duration_ns as f64 / 1e9,
        header.connections,
        header.rate,
        header.arrivals,
        summary.throughput
    );
    let counts = summary.counts;
    let _ = writeln!(
        text,
        "requests {}   errors {}   wrong answers {}   timed out {}   lost {}   dropped connections {}",
        counts.requests, counts.errors, counts.wrong, counts.timeouts, counts.lost, end.dropped
    );
    if header.idle + header.blocking > 0 {
        let _ = writeln!(
            text,
            "alive at the end: {} of {} idle, {} of {} blocking",
            end.idle_alive, header.idle, end.blocking_alive, header.blocking
        );
    }
    text += &table(summary);
    let _ = write!(text, "blackout {}", time(summary.blackout.duration_ns));
    for complaint in &finished.complaints {
        let _ = write!(text, "\n  {}", one_line(complaint));
    }
    text
}

fn table(summary: &Summary) -> String {
    let mut text = format!("{:<10}{:>10}", "", "requests");
    for head in ["p50", "p90", "p99", "p99.9", "max"] {
        let _ = write!(text, "{head:>11}");
    }
    text.push('\n');
    let mut row = |name: &str, latency: &Latency| {
        let _ = write!(text, "{name:<10}{:>10}", latency.count);
        let Latency { p50_ns, p90_ns, p99_ns, p999_ns, max_ns, .. } = *latency;
        for ns in [p50_ns, p90_ns, p99_ns, p999_ns, max_ns] {
            let _ = write!(text, "{:>11}", time(ns));
        }
        text.push('\n');
    };
    row("latency", &summary.latency);
    if summary.kinds.len() > 1 {
        summary.kinds.iter().for_each(|kind| row(&format!("  {}", kind.kind), &kind.latency));
    }
    row("lateness", &summary.lateness);
    text
}

/// Time in a suitable unit.
fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}
