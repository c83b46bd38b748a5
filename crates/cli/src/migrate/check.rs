//! `stillpoint migrate check`: contents of the database, and the effects of a migration on them.

use super::servers::{OnServers, REACHABILITY_HINT, Servers, block_on};
use crate::output::{Failure, Output};
use std::sync::Arc;
use stillpoint_migrate_engine::{
    AcceptedRestrictions, Capture, Options, Placement, Report, Roles, Schedule, Selection, Settings, Verdict, check,
};
use tokio::signal::unix::{SignalKind, signal};

/// Orders in which statements are repeated.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum ScheduleOrder {
    /// First reads and commits keep the order that transactions could observe (Madeus' LSIR).
    Lsir,
    /// Order of lsir, and one commit at a time.
    BCon,
    /// One transaction at a time, its first operation and its writes.
    BMin,
    /// One transaction at a time, with all its reads.
    BAll,
}

/// Data to move and accepted losses: the arguments of `stillpoint migrate check`, and of `run`.
#[derive(Clone, clap::Args)]
pub(crate) struct MigrationArgs {
    #[command(flatten)]
    pub(super) servers: Servers,
    /// Accept that unlogged tables are moved empty.
    #[arg(long)]
    unlogged_empty: bool,
    /// Source of changes: the source's log by pgoutput; row images captured by the proxy, which takes clients' time and
    /// does not require wal_level=logical; or the statements themselves, at REPEATABLE READ, without parameters and
    /// without values that depend on the time. Default: the log if wal_level is logical, else rows.
    #[arg(long, value_enum, value_name = "WHERE")]
    capture: Option<Capture>,
    /// With `--capture statements`: the order in which they are replayed; default lsir.
    #[arg(long, value_enum, value_name = "ORDER")]
    schedule: Option<ScheduleOrder>,
    /// Handling of the roles that the database needs: those that own objects or have rights in it, those that may log
    /// in and connect, and those of which these are members.
    #[arg(long, value_enum, value_name = "HOW", default_value = "check")]
    roles: Roles,
    /// Handling of server settings that matter to statements: compare them, or write those of the source to the target by
    /// ALTER SYSTEM before the switch, for all databases there.
    #[arg(long, value_enum, value_name = "HOW", default_value = "compare")]
    settings: Settings,
    /// Accept that `fallback` is not possible, for a target without a logical log.
    #[arg(long)]
    no_fallback: bool,
    /// Make the logical slots of other readers (Debezium and the like) on the target before any client writes there, and
    /// move clients only when the readers have confirmed what the source had written by then.
    #[arg(long)]
    move_slots: bool,
    /// Move only what this pattern selects, and what that needs: `SCHEMA`, `SCHEMA.*` or `SCHEMA.TABLE`, with `*` and `?`,
    /// as in psql. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Leave out what this pattern selects: after the switch clients do not find it, and connections to the source are
    /// disabled. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Tablespace of the target for what is in another one on the source. May be repeated.
    #[arg(long = "tablespace", value_name = "OLD=NEW", conflicts_with = "no_tablespaces")]
    tablespaces: Vec<String>,
    /// Put everything into the target's default tablespace.
    #[arg(long)]
    no_tablespaces: bool,
    /// Locale of the target's database, of its C library, if it has none like the source's.
    #[arg(long, value_name = "LOCALE")]
    locale: Option<String>,
    /// Encoding of the target's database, if it is another one. Every text must exist in it.
    #[arg(long, value_name = "ENCODING")]
    encoding: Option<String>,
    /// With --include: accept that all else is left out, although no --exclude names it.
    #[arg(long, requires = "include")]
    leave_rest: bool,
}

impl MigrationArgs {
    /// Converts these arguments to options.
    pub(super) fn options(&self) -> Result<Options, Failure> {
        let mut options = self.servers.options()?;
        options.capture = self.capture;
        if let Some(order) = self.schedule {
            if options.capture != Some(Capture::Statements) {
                return Err(Failure::usage("--schedule requires --capture statements"));
            }
            options.schedule = match order {
                ScheduleOrder::Lsir => Schedule::Lsir,
                ScheduleOrder::BCon => Schedule::BCon,
                ScheduleOrder::BMin => Schedule::BMin,
                ScheduleOrder::BAll => Schedule::BAll,
            };
        }
        options.roles = self.roles;
        options.selection = Selection::parse(&self.include, &self.exclude, self.leave_rest).map_err(Failure::usage)?;
        let (locale, encoding) = (self.locale.clone(), self.encoding.clone());
        options.placement =
            Placement::parse(&self.tablespaces, self.no_tablespaces, locale, encoding).map_err(Failure::usage)?;
        options.move_slots = self.move_slots;
        options.settings = self.settings;
        options.accepted = AcceptedRestrictions {
            unlogged_empty: self.unlogged_empty,
            no_fallback: self.no_fallback,
            ..AcceptedRestrictions::default()
        };
        Ok(options)
    }
}

/// Arguments of `stillpoint migrate check`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    what: MigrationArgs,
    /// Do not create the definitions on the target as a trial, and do not read rows; unchecked objects are listed.
    #[arg(long)]
    no_rehearsal: bool,
}

/// Runs `stillpoint migrate check`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    args.what.run_each(output, |what| examine(what, !args.no_rehearsal, output))
}

impl OnServers for MigrationArgs {
    fn servers(&mut self) -> &mut Servers {
        &mut self.servers
    }
}

/// Checks, and prints the findings. Ctrl-C and SIGTERM end it without any remains.
pub(super) fn examine(what: &MigrationArgs, rehearse: bool, output: &Output) -> Result<(), Failure> {
    let options = Options { rehearse, ..what.options()? };
    let report = block_on(async {
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
        true => Failure::refused(error).hint(REACHABILITY_HINT),
        false => Failure::failed(error, "nothing was touched").hint(REACHABILITY_HINT),
    })?;
    show(&report, output);
    report
        .accepted()
        .map_err(|error| Failure::refused(error).hint("correct the causes named above, then run `check` again"))
}

fn show(report: &Report, output: &Output) {
    output.result("checked", report);
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
            Verdict::NotLookedAt => "not checked",
        };
        output.line(format_args!("{verdict:13}  {:kinds$}  {:names$}  {}", finding.kind, finding.name, finding.note));
    }
}
