//! `stillpoint migrate check`: contents of the database, and the effects of a migration on them.

use super::servers::{REACH, Servers, quietly};
use crate::output::{Failure, Output};
use serde::Serialize;
use std::sync::Arc;
use stillpoint_migrate_engine::{Accepted, Capture, Options, Report, Roles, Schedule, Verdict, check};
use tokio::signal::unix::{SignalKind, signal};

/// Sources of changes.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Where {
    /// The source's log.
    Log,
    /// What statements write, as they pass through the proxy.
    Rows,
    /// The statements themselves.
    Statements,
}

/// Orders in which statements are repeated.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Order {
    /// First reads and commits keep the order that each could see (Madeus' LSIR).
    Lsir,
    /// As lsir, and one commit at a time.
    BCon,
    /// One transaction at a time, its first operation and its writes.
    BMin,
    /// One transaction at a time, with all its reads.
    BAll,
}

/// Handling of roles.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum OfRoles {
    /// Make those on the target that it lacks, with attributes, password, memberships and settings.
    Create,
    /// Compare them, and name what differs.
    Check,
    /// Look only at those without which definitions cannot be made.
    Ignore,
}

/// Data to move and accepted losses: the arguments of `stillpoint migrate check`, and of `run`.
#[derive(clap::Args)]
pub(crate) struct What {
    #[command(flatten)]
    pub(super) servers: Servers,
    /// Unlogged tables arrive empty.
    #[arg(long)]
    unlogged_empty: bool,
    /// Where changes are captured: the source's log by pgoutput, or the proxy by images of rows, which takes clients' time
    /// and needs no wal_level=logical, or by the statements themselves: at REPEATABLE READ, without parameters, and nothing
    /// of the moment. Without it: the log, where that tells of rows, else rows.
    #[arg(long, value_enum, value_name = "WHERE")]
    capture: Option<Where>,
    /// With `--capture statements`: the order in which they are repeated; lsir without it.
    #[arg(long, value_enum, value_name = "ORDER")]
    schedule: Option<Order>,
    /// Roles that go with the database: those that own or may use something in it, those that may log in and connect, and those of
    /// which these are members.
    #[arg(long, value_enum, value_name = "HOW", default_value = "check")]
    roles: OfRoles,
    /// Do without a way back, for a target that keeps no logical log.
    #[arg(long)]
    no_fallback: bool,
}

impl What {
    /// Converts these arguments to options.
    pub(super) fn options(&self) -> Result<Options, Failure> {
        let mut options = self.servers.options()?;
        options.capture = self.capture.map(|at| match at {
            Where::Log => Capture::Log,
            Where::Rows => Capture::Rows,
            Where::Statements => Capture::Statements,
        });
        if let Some(order) = self.schedule {
            if options.capture != Some(Capture::Statements) {
                return Err(Failure::usage("--schedule is for --capture statements"));
            }
            options.schedule = match order {
                Order::Lsir => Schedule::Lsir,
                Order::BCon => Schedule::BCon,
                Order::BMin => Schedule::BMin,
                Order::BAll => Schedule::BAll,
            };
        }
        options.roles = match self.roles {
            OfRoles::Create => Roles::Create,
            OfRoles::Check => Roles::Check,
            OfRoles::Ignore => Roles::Ignore,
        };
        options.accepted =
            Accepted { unlogged_empty: self.unlogged_empty, no_fallback: self.no_fallback, ..Accepted::default() };
        Ok(options)
    }
}

/// Arguments of `stillpoint migrate check`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::MIGRATE_CHECK)]
pub(crate) struct Args {
    #[command(flatten)]
    what: What,
    /// Do not make the definitions on the target for a trial, nor look into rows: what is not looked at is named.
    #[arg(long)]
    no_rehearsal: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    event: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

/// Runs `stillpoint migrate check`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    look(&args.what, !args.no_rehearsal, output)
}

/// Checks, and prints the findings. Ctrl-C and SIGTERM end it without any remains.
pub(super) fn look(what: &What, rehearse: bool, output: &Output) -> Result<(), Failure> {
    let options = Options { rehearse, ..what.options()? };
    let report = quietly(async {
        let interrupt = Arc::clone(&options.interrupt);
        if let (Ok(mut interrupted), Ok(mut terminated)) =
            (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
        {
            tokio::spawn(async move {
                tokio::select! { _ = interrupted.recv() => {}, _ = terminated.recv() => {} }
                interrupt.notify_one();
            });
        }
        check(&options).await
    })?;
    let report = report.map_err(|error| match error.is_refusal() {
        true => Failure::refused(error).hint(REACH),
        false => Failure::failed(error, "nothing was touched").hint(REACH),
    })?;
    show(&report, output);
    report.accepted().map_err(|error| Failure::refused(error).hint("change what is named, then check again"))
}

fn show(report: &Report, output: &Output) {
    output.json(&Line { v: stillpoint_events::VERSION, event: "checked", report });
    output.line(format_args!("capture: {}", report.capture));
    output.line(format_args!("tables: {:.1} MiB", report.bytes as f64 / (1 << 20) as f64));
    let width =
        |of: fn(&stillpoint_migrate_engine::Finding) -> usize| report.findings.iter().map(of).max().unwrap_or(0);
    let (kinds, names) = (width(|finding| finding.kind.len()), width(|finding| finding.name.len()).min(40));
    for finding in &report.findings {
        let verdict = match finding.verdict {
            Verdict::Moved => "moved",
            Verdict::Changed => "changed",
            Verdict::NotMoved => "not moved",
            Verdict::Refused => "REFUSED",
            Verdict::NotLookedAt => "not looked at",
        };
        output.line(format_args!("{verdict:13}  {:kinds$}  {:names$}  {}", finding.kind, finding.name, finding.note));
    }
}
