//! `stillpoint kernel switch`, and the commands that systemd runs for it when a kernel starts.

use super::program::PASSES;
use super::{failure, untouched};
use crate::output::{Exit, Failure, Output};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use stillpoint_kernel_checkpoint::RestoreMode;
use stillpoint_kernel_switch::{
    CONFIG, Config, Plan, boot, check_switch, continue_resume, dropin, reset_machine, restore_unit, resume, roll_back,
    run_guardian as guard_switch, switch,
};
use stillpoint_operation::{FaultPoint, Faults};

/// Arguments of `stillpoint kernel switch`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Version of the kernel to switch to, as in the names of its files in /boot: 6.12.95+deb12-amd64.
    #[arg(long, value_name = "VERSION", required_unless_present = "take_back")]
    to: Option<String>,
    /// Systemd unit that keeps its memory and connections; can be given several times [default: all units of the configuration].
    #[arg(long, value_name = "NAME")]
    unit: Vec<String>,
    /// Configuration file, with all other settings.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Time at which memory is restored [default: as configured, otherwise on-demand].
    #[arg(long, value_enum, value_name = "WHEN")]
    memory: Option<RestoreMode>,
    /// Maximum number of passes over memory while the units run.
    #[arg(long, default_value_t = PASSES, value_name = "N")]
    passes: u32,
    /// Only check; change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Only roll back a switch that was killed together with its guardian; `kernel status` reports such a switch.
    #[arg(long, conflicts_with_all = ["to", "dry_run"])]
    take_back: bool,
    /// For tests: fail in this phase.
    #[arg(long, hide = true, value_name = "PHASE")]
    fail_in: Option<String>,
    /// For tests: reset the machine when this phase begins.
    #[arg(long, hide = true, value_name = "PHASE")]
    lose_power_in: Option<String>,
    /// For tests: kill this process when this phase begins.
    #[arg(long, hide = true, value_name = "PHASE")]
    killed_in: Option<String>,
}

/// Runs `stillpoint kernel switch`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let mut config = Config::read(&args.config).map_err(untouched)?;
    config.select(&args.unit);
    config.memory = args.memory.unwrap_or(config.memory);
    let Some(to) = &args.to else { return run_roll_back(&config, output) };
    let plan = Plan { to: to.clone(), config, passes: args.passes, faults: faults(args) };
    if args.dry_run {
        let journal = check_switch(&plan).map_err(untouched)?;
        output.result("kernel-switch-check", &BTreeMap::from([("journal", &journal)]));
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

/// Runs `stillpoint kernel switch-guardian`.
pub(crate) fn run_guardian() -> Result<(), Failure> {
    // a signal to a whole session or service is meant for the switch; this process ends by itself when it has nothing left to do
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, Arc::default()).map_err(Failure::refused)?;
    }
    guard_switch().map_err(|error| failure(error, "stillpoint kernel status reports what remains of it"))
}

/// Faults that a test requests.
fn faults(args: &Args) -> Faults {
    let mut faults = Faults::none();
    if let Some(phase) = &args.fail_in {
        faults = faults.failing(FaultPoint::before(phase));
    }
    if let Some(phase) = &args.killed_in {
        faults = faults.killing(FaultPoint::before(phase));
    }
    if let Some(phase) = &args.lose_power_in {
        faults = faults.calling(FaultPoint::before(phase), reset_machine);
    }
    faults
}

/// Arguments of `stillpoint kernel dropin`.
#[derive(clap::Args)]
pub(crate) struct DropinArgs {
    /// Name of the unit.
    unit: String,
}

/// Runs `stillpoint kernel dropin`.
pub(crate) fn run_dropin(args: &DropinArgs, output: &Output) -> Result<(), Failure> {
    let text = dropin(&args.unit).map_err(untouched)?;
    output.lines(format_args!("{}", text.as_deref().unwrap_or("# this unit needs no drop-in for a switch").trim_end()));
    Ok(())
}

/// Arguments of `stillpoint kernel boot`, which systemd runs as a generator.
#[derive(clap::Args)]
pub(crate) struct BootArgs {
    /// Configuration of switches, which contains the path of the journal.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Directory for generated units; two more directories, for other priorities, are not used.
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
    /// Directory of the journal.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Continue after a leader that was killed.
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
    /// Directory of the journal.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Name of the unit.
    unit: String,
}

/// Runs `stillpoint kernel switch-unit`.
pub(crate) fn run_unit(args: &UnitArgs) -> Result<(), Failure> {
    restore_unit(&args.state, &args.unit).map(|_| ()).map_err(|error| failure(error, "the unit was not released"))
}
