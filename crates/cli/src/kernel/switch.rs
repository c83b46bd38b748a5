//! `stillpoint kernel switch`, and the commands that systemd runs for it when a kernel starts.

use super::failure;
use super::program::PASSES;
use crate::output::{Exit, Failure, Output};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::PathBuf;
use std::sync::Arc;
use stillpoint_kernel_engine::switch::{
    CONFIG, Config, Journal, Memory, Plan, boot, check_switch, continue_resume, dropin, restore_unit, resume,
    roll_back, run_guardian as guard_switch, switch,
};

/// Arguments of `stillpoint kernel switch`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The kernel to go to, as its files in /boot are called: 6.12.95+deb12-amd64.
    #[arg(long, value_name = "VERSION", required_unless_present = "take_back")]
    to: Option<String>,
    /// A systemd unit that goes along; more than one if given again [default: all that the configuration names].
    #[arg(long, value_name = "NAME")]
    unit: Vec<String>,
    /// Everything else.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// When memory comes back [default: as the configuration says, otherwise on-demand].
    #[arg(long, value_enum, value_name = "WHEN")]
    memory: Option<When>,
    /// Passes over memory while the units run, at most.
    #[arg(long, default_value_t = PASSES, value_name = "N")]
    passes: u32,
    /// Do everything short of touching: check.
    #[arg(long)]
    dry_run: bool,
    /// Only take back what a switch has left that was killed together with its guardian: `kernel status` says when.
    #[arg(long, conflicts_with_all = ["to", "dry_run"])]
    take_back: bool,
    /// Fail in this phase.
    #[arg(long, hide = true, value_name = "PHASE")]
    fail_in: Option<String>,
    /// Lose the machine's power when this phase begins.
    #[arg(long, hide = true, value_name = "PHASE")]
    lose_power_in: Option<String>,
    /// Be killed when this phase begins.
    #[arg(long, hide = true, value_name = "PHASE")]
    killed_in: Option<String>,
}

/// Time at which memory is loaded.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum When {
    /// When it is asked for, and in the background.
    OnDemand,
    /// All of it before anything runs.
    Eager,
}

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    event: &'static str,
    journal: &'a Journal,
}

/// Runs `stillpoint kernel switch`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let untouched = |error| failure(error, "nothing was touched");
    let mut config = Config::read(&args.config).map_err(untouched)?;
    config.select(&args.unit);
    match args.memory {
        Some(When::OnDemand) => config.memory = Memory::OnDemand,
        Some(When::Eager) => config.memory = Memory::Eager,
        None => {}
    }
    let Some(to) = &args.to else { return run_roll_back(&config, output) };
    let (fail_in, lose_power_in, killed_in) =
        (args.fail_in.clone(), args.lose_power_in.clone(), args.killed_in.clone());
    let plan = Plan { to: to.clone(), config, passes: args.passes, fail_in, lose_power_in, killed_in };
    if args.dry_run {
        let journal = check_switch(&plan).map_err(untouched)?;
        output.json(&Line { v: stillpoint_events::VERSION, event: "kernel-switch-check", journal: &journal });
        for unit in &journal.units {
            output.line(format_args!("{}: process {}, ports {:?}", unit.name, unit.pid, unit.ports));
        }
        if let Some(watchdog) = &journal.watchdog {
            output.line(format_args!(
                "a kernel that hangs is reset after {} s by a watchdog ({})",
                watchdog.limit_s, watchdog.driver
            ));
        }
        if let Some(crash) = &journal.crash {
            let stays = journal.config.crash_kernel_stays;
            output.line(format_args!("{}", crash.description(&journal.from, &journal.to, stays)));
        }
        for text in journal.remaining.descriptions(journal.config.stop_limit_s) {
            output.line(format_args!("remaining units: {text}"));
        }
        for text in journal.warnings() {
            output.line(format_args!("warning: {text}"));
        }
        output.line(format_args!("from {} to {}: no obstacles found", journal.from, journal.to));
        return Ok(());
    }
    let Err(error) = switch(&plan, &|event| output.event(event));
    if error.is_refusal() {
        return Err(Failure::refused(error));
    }
    let state = "the units run on this kernel as before";
    Err(Failure { exit: Exit::FellBack, error: error.into(), state: state.into(), hint: None })
}

fn run_roll_back(config: &Config, output: &Output) -> Result<(), Failure> {
    let state = "see journal.json in the state directory";
    match roll_back(&config.state).map_err(|error| failure(error, state))? {
        None => output.line(format_args!("there is no killed switch to roll back")),
        Some(journal) => {
            output.line(format_args!("switch from {} to {}: {}", journal.from, journal.to, journal.summary()))
        }
    }
    Ok(())
}

/// Arguments of the process that outlives a switch.
#[derive(clap::Args)]
pub(crate) struct GuardianArgs {
    /// Where the journal lies.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// The switch.
    #[arg(long, value_name = "N")]
    pid: i32,
}

/// Runs `stillpoint kernel switch-guardian`.
pub(crate) fn run_guardian(args: &GuardianArgs) -> Result<(), Failure> {
    // a signal to a whole session or service is meant for the switch; this process ends by itself when it has nothing left to do
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, Arc::default()).map_err(Failure::refused)?;
    }
    guard_switch(&args.state, args.pid)
        .map_err(|error| failure(error, "stillpoint kernel status reports what remains of it"))
}

/// Arguments of `stillpoint kernel dropin`.
#[derive(clap::Args)]
pub(crate) struct DropinArgs {
    /// Which unit.
    unit: String,
}

/// Runs `stillpoint kernel dropin`.
pub(crate) fn run_dropin(args: &DropinArgs, output: &Output) -> Result<(), Failure> {
    let text = dropin(&args.unit).map_err(|error| failure(error, "nothing was touched"))?;
    output.lines(format_args!("{}", text.as_deref().unwrap_or("# this unit needs no drop-in for a switch").trim_end()));
    Ok(())
}

/// Arguments of `stillpoint kernel boot`, which systemd runs as a generator.
#[derive(clap::Args)]
pub(crate) struct BootArgs {
    /// Where the journal of switches is named.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Where generated units go; two more, for other priorities, are not used.
    #[arg(num_args = 1..=3)]
    units: Vec<PathBuf>,
}

/// Runs `stillpoint kernel boot`.
pub(crate) fn run_boot(args: &BootArgs) -> Result<(), Failure> {
    let state = "units that have images are not started from their files";
    let config = Config::read(&args.config).map_err(|error| failure(error, state))?;
    let units = args.units.first().ok_or_else(|| Failure::usage("a directory for units"))?;
    boot(&config.state, units).map(|_| ()).map_err(|error| failure(error, state))
}

/// Arguments of the programs that control a restore.
#[derive(clap::Args)]
pub(crate) struct ResumeArgs {
    /// Where the journal lies.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Go on where one that was killed has stopped.
    #[arg(long)]
    after: bool,
}

/// Runs `stillpoint kernel switch-resume`.
pub(crate) fn run_resume(args: &ResumeArgs) -> Result<(), Failure> {
    let done = if args.after { continue_resume(&args.state) } else { resume(&args.state).map(|_| ()) };
    done.map_err(|error| failure(error, "see journal.json in the state directory"))
}

/// Arguments of the program that systemd starts in a unit's place.
#[derive(clap::Args)]
pub(crate) struct UnitArgs {
    /// Where the journal lies.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Which unit.
    unit: String,
}

/// Runs `stillpoint kernel switch-unit`.
pub(crate) fn run_unit(args: &UnitArgs) -> Result<(), Failure> {
    restore_unit(&args.state, &args.unit).map(|_| ()).map_err(|error| failure(error, "the unit was not released"))
}
