//! `stillpoint migrate run`: moves a database and its clients.

use super::check;
use super::servers::{OnServers, Servers, block_on, failure, first_failure, run_several, run_watched};
use crate::output::{Failure, Output};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_migrate_engine::{
    ClientPasswords, Options, Outcome, Phase, SwitchHooks, finish, run as migrate, run_together, status,
};
use zeroize::Zeroizing;

/// Arguments of `stillpoint migrate run`.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    what: check::MigrationArgs,
    #[command(flatten)]
    how: MoveArgs,
    /// Number of tables that are copied, and of indexes that are created, at the same time.
    #[arg(long, default_value_t = 2, value_name = "N")]
    copy_jobs: usize,
    /// Share of their throughput that clients keep while rows are copied, changes replayed and both sides compared; 0
    /// runs at full speed.
    #[arg(long, default_value_t = 0.85, value_name = "PART")]
    share: f64,
    /// Maximum time that the snapshot waits for older transactions to end.
    #[arg(long, value_parser = crate::patch::duration, default_value = "60s", value_name = "TIME")]
    snapshot_timeout: Duration,
    /// Follow until `stillpoint migrate switch` orders clients to move.
    #[arg(long)]
    hold: bool,
    /// Shell command to run before clients are paused, with a description of the migration in JSON on its standard
    /// input. If it fails, clients stay.
    #[arg(long, value_name = "COMMAND")]
    before_switch: Option<String>,
    /// Shell command to run after clients have moved, with the same input.
    #[arg(long, value_name = "COMMAND")]
    after_switch: Option<String>,
    /// Run `finish` this long after clients have moved; until then the command keeps running.
    #[arg(long, value_parser = crate::patch::duration, value_name = "TIME")]
    finish_after: Option<Duration>,
    /// Only check; change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Options for moving clients from one side to the other.
#[derive(Clone, clap::Args)]
pub(super) struct MoveArgs {
    /// Number of apply workers: connections that replay at the same time.
    #[arg(long, default_value_t = 4, value_name = "N")]
    players: usize,
    /// Maximum pause of clients; after it they continue where they were, and the pause is tried again.
    #[arg(long, value_parser = crate::patch::duration, default_value = "500ms", value_name = "TIME")]
    pause_timeout: Duration,
    /// Maximum number of pauses that are tried.
    #[arg(long, default_value_t = 10, value_name = "N")]
    pause_attempts: u32,
    /// Do not compare both sides before the switch-over.
    #[arg(long)]
    no_compare: bool,
    /// File with lines `ROLE PASSWORD`, for servers that do not show stored passwords, as those of hosting providers: sessions
    /// of these roles log in with them when they are moved. Only its owner may have access to it.
    #[arg(long, value_name = "FILE")]
    client_passwords: Option<PathBuf>,
    /// Refresh materialized views inside the pause, not only before it. It must be over within the maximum pause.
    #[arg(long)]
    refresh_at_switch: bool,
}

impl MoveArgs {
    pub(super) fn apply(&self, options: &mut stillpoint_migrate_engine::Options) -> Result<(), Failure> {
        if self.players == 0 || self.players > 64 || self.pause_attempts == 0 {
            return Err(Failure::usage("--players must be 1 to 64, --pause-attempts at least 1"));
        }
        options.players = self.players;
        options.pause_limit = self.pause_timeout;
        options.pause_attempts = self.pause_attempts;
        options.compare = !self.no_compare;
        options.refresh_at_switch = self.refresh_at_switch;
        if let Some(path) = &self.client_passwords {
            options.client_passwords = read_passwords(path)?;
        }
        Ok(())
    }
}

/// Reads the file of `--client-passwords`.
pub(super) fn read_passwords(path: &Path) -> Result<ClientPasswords, Failure> {
    const LENGTH_MAX: u64 = 16 << 20;
    let file = stillpoint_host::file::open_named(path).map_err(Failure::refused)?;
    let mode = file.metadata().map_err(Failure::refused)?.mode();
    let path = path.display();
    if mode & 0o077 != 0 {
        let error = anyhow::anyhow!("{path} has mode {:04o}: others may read or change it", mode & 0o7777);
        return Err(Failure::refused(error).hint(format!("chmod 0600 {path}")));
    }
    let mut text = Zeroizing::new(String::new());
    file.take(LENGTH_MAX + 1).read_to_string(&mut text).map_err(Failure::refused)?;
    if text.len() as u64 > LENGTH_MAX {
        return Err(Failure::refused(anyhow::anyhow!("{path} is longer than {LENGTH_MAX} bytes")));
    }
    ClientPasswords::parse(&text).map_err(|why| Failure::refused(anyhow::anyhow!("{path}: {why}")))
}

impl OnServers for Args {
    fn servers(&mut self) -> &mut Servers {
        &mut self.what.servers
    }
}

impl Args {
    fn options(&self) -> Result<Options, Failure> {
        let mut options = self.what.options()?;
        self.how.apply(&mut options)?;
        if self.copy_jobs == 0 || self.copy_jobs > 64 || !(0.0..1.0).contains(&self.share) {
            return Err(Failure::usage("--copy-jobs must be 1 to 64, --share at least 0 and below 1"));
        }
        (options.copy_jobs, options.share) = (self.copy_jobs, self.share);
        options.snapshot_limit = self.snapshot_timeout;
        options.hold = self.hold;
        options.hooks =
            SwitchHooks { before_switch: self.before_switch.clone(), after_switch: self.after_switch.clone() };
        Ok(options)
    }
}

/// Runs `stillpoint migrate run`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let each = args.each()?;
    let options = each.iter().map(Args::options).collect::<Result<Vec<_>, _>>()?;
    if args.dry_run {
        return args.run_each(output, |args| check::examine(&args.what, false, output));
    }
    match (each.as_slice(), options.as_slice()) {
        ([one], [options]) => {
            let outcome = run_watched(&one.what.servers, options, output, |observer| migrate(options, observer))?;
            tell(options, &outcome, output);
        }
        _ => {
            let servers: Vec<Servers> = each.iter().map(|args| args.what.servers.clone()).collect();
            let ended = run_several(&servers, output, async |interrupt, observer| {
                run_together(&options, &interrupt, move |event| observer(event)).await
            })?;
            let tell = |(options, ended): (&Options, Result<Outcome, Failure>)| {
                ended.map(|outcome| tell(options, &outcome, output))
            };
            first_failure(options.iter().zip(ended).map(tell), output)?;
        }
    }
    let Some(after) = args.finish_after else { return Ok(()) };
    let begun = Instant::now();
    first_failure(
        options.iter().map(|options| finish_later(after.saturating_sub(begun.elapsed()), options, output)),
        output,
    )
}

fn tell(options: &Options, outcome: &Outcome, output: &Output) {
    let database = &options.source.database;
    match outcome {
        Outcome::Switched { paused } => output.line(format_args!(
            "{database}: clients are on the target, and were paused for {:.1} ms. `fallback` rolls back, `finish` ends the \
             migration",
            paused.as_secs_f64() * 1e3
        )),
        Outcome::AlreadyThere => output.line(format_args!("{database}: clients are already on the target")),
    }
}

/// Ends the migration after some time, unless the operator has ended it or rolled it back meanwhile.
fn finish_later(after: Duration, options: &Options, output: &Output) -> Result<(), Failure> {
    let database = &options.source.database;
    let begun = Instant::now();
    output.line(format_args!("{database}: the migration is finished in {} s; Ctrl-C leaves it open", after.as_secs()));
    let is_open = || {
        let status = block_on(status(options))?.map_err(|error| Failure::failed(error, "clients are on the target"))?;
        Ok(status.record.is_some_and(|record| record.phase == Phase::Switched))
    };
    while begun.elapsed() < after {
        std::thread::sleep(FINISH_INTERVAL.min(after - begun.elapsed()));
        if !is_open()? {
            output.line(format_args!("{database}: the migration was ended by another command"));
            return Ok(());
        }
    }
    block_on(finish(options))?.map_err(failure)?;
    output.line(format_args!("{database}: the migration is finished"));
    Ok(())
}

/// Interval between two looks at a migration that is to be finished later.
const FINISH_INTERVAL: Duration = Duration::from_secs(5);
