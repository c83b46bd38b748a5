//! `stillpoint patch scan`: compares every running process with what is installed and what the archive offers.

use super::scan_text::{exposition, monitoring_line, print};
use crate::output::{Failure, Output, Success};
use std::path::{Path, PathBuf};
use stillpoint_host::cache::default_root;
use stillpoint_patch_engine::peek;
use stillpoint_patch_provenance::scan::{Level, LivePatch, Reason, Report, Request, scan};
use stillpoint_patch_provenance::{APT_ARCHIVES, Error, SeenPackages};
use stillpoint_patch_tracee::Pid;

/// Exit codes, printed after the options.
const AFTER_HELP: &str = "Exit status: 0 scanned, with or without findings; 1 failed; 2 usage. With --monitoring: 0 everything was looked at, and \
     is current or fixed live; 1 a newer version is there, and no security problem is known; 2 a security problem is known; 3 not everything \
     was looked at, or the scan failed";

/// Arguments of `stillpoint patch scan`.
#[derive(clap::Args)]
#[command(after_help = [AFTER_HELP, "\n\n", crate::examples::of("stillpoint patch scan")].concat())]
pub(crate) struct Args {
    /// List files that are current as well.
    #[arg(long)]
    all: bool,
    /// File of a security tracker, which names CVEs: the JSON of Debian's security tracker, or records of OSV.
    #[arg(long, value_name = "FILE")]
    tracker: Option<PathBuf>,
    /// Directories of `.deb` files, in addition to apt's cache: they tell which version a replaced file has.
    #[arg(long, value_name = "DIR", num_args = 1..)]
    sources: Vec<PathBuf>,
    /// Print gauges in the text format of Prometheus, for instance for node_exporter's textfile collector.
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
    /// Print one line with performance data, and exit as a monitoring plug-in does.
    #[arg(long, conflicts_with_all = ["json", "prometheus", "all"])]
    monitoring: bool,
    /// Reasons for not looking at something that --monitoring accepts.
    #[arg(long, value_name = "REASON", value_delimiter = ',', value_parser = reason, requires = "monitoring")]
    accept: Vec<Reason>,
}

pub(super) fn reason(text: &str) -> Result<Reason, String> {
    let names = || Reason::ALL.map(Reason::name).join(", ");
    Reason::ALL
        .into_iter()
        .find(|reason| reason.name() == text)
        .ok_or_else(|| format!("`{text}` is none of {}", names()))
}

/// Runs `stillpoint patch scan`.
pub(crate) fn run(args: Args, output: &Output) -> Result<Success, Failure> {
    let found = look(args.tracker.as_deref(), &args.sources);
    if args.monitoring {
        let (level, line) = match &found {
            Ok(report) => (report.level(&args.accept), monitoring_line(report, &args.accept)),
            Err(error) => (Level::Unknown, format!("STILLPOINT UNKNOWN - {error}")),
        };
        output.line(line);
        return Ok(match level {
            Level::Ok => Success::Done,
            Level::Warning => Success::PlugInWarning,
            Level::Critical => Success::PlugInCritical,
            Level::Unknown => Success::PlugInUnknown,
        });
    }
    let report = found.map_err(failure)?;
    if args.prometheus {
        output.lines(exposition(&report).trim_end());
    } else {
        output.result("scan", &report);
        print(&report, args.all, output);
    }
    Ok(Success::Done)
}

/// Scans this machine.
pub(super) fn look(tracker: Option<&Path>, sources: &[PathBuf]) -> Result<Report, Error> {
    let mut debs = vec![PathBuf::from(APT_ARCHIVES)];
    debs.extend(sources.iter().cloned());
    let unpacked = default_root().ok().map(|root| root.join("binaries"));
    let request = Request { seen: SeenPackages { debs, unpacked }, tracker: tracker.map(Path::to_owned) };
    scan(&request, &mut live_patches)
}

pub(super) fn failure(error: Error) -> Failure {
    let hint = match &error {
        Error::Malformed { what, .. } if what.starts_with("tracker file") => Some(
            "the JSON of https://security-tracker.debian.org, or records of OSV; the same command without --tracker",
        ),
        Error::Program { .. } => Some("apt-get update"),
        _ => None,
    };
    Failure { hint: hint.map(str::to_owned), ..Failure::failed(error, "nothing was changed") }
}

/// Returns the active patches of a process, by its ledger.
fn live_patches(pid: Pid) -> Result<Vec<LivePatch>, String> {
    use stillpoint_patch_engine::Error as Engine;
    use stillpoint_patch_tracee::Error as Edge;
    match peek(pid) {
        Ok(None) => Ok(Vec::new()),
        Ok(Some(status)) => {
            let damaged = status.entries.iter().find(|entry| !entry.verified);
            if let Some(entry) = damaged {
                return Err(format!("the entry of {} has unexpected contents", entry.function));
            }
            if status.unfinished.is_some() {
                return Err("a transition is unfinished".to_owned());
            }
            let live = status.patches.into_iter();
            Ok(live.map(|patch| LivePatch { name: patch.name, cves: patch.cves, build_id: patch.build_id }).collect())
        }
        // such a program is never patched
        Err(Engine::Tracee(Edge::NotX86_64 { .. } | Edge::Static(_) | Edge::Gone(_) | Edge::Zombie(_))) => {
            Ok(Vec::new())
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the number of processes that need something.
pub(super) fn open(report: &Report) -> usize {
    report.counts.outdated + report.counts.replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_read_as_they_are_written() {
        for known in Reason::ALL {
            assert_eq!(reason(known.name()), Ok(known));
            assert_eq!(serde_json::to_string(&known).unwrap(), format!("\"{}\"", known.name()));
        }
        assert!(reason("all").unwrap_err().contains("no-right, other-root"));
    }
}
