//! `stillpoint patch list`: lists every process that carries patches.

use super::status::brief;
use crate::output::{Failure, Output};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use stillpoint_host::kernel_files;
use stillpoint_patch_engine::Status;
use stillpoint_patch_engine::fleet::{PatchedProcesses, patched_processes};
use stillpoint_patch_tracee::Pid;

/// Arguments of `stillpoint patch list`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print gauges in the text format of Prometheus, for instance for node_exporter's textfile collector.
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
}

/// Runs `stillpoint patch list`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let PatchedProcesses { found, uninspected, unknown } = patched_processes();
    let left_out = unknown.len();
    for (pid, error) in unknown {
        output.warn(format_args!("process {pid} was skipped: {:#}", anyhow::Error::from(error)));
    }
    if args.prometheus {
        output.lines(exposition(&found, uninspected.len(), left_out).trim_end());
        return Ok(());
    }
    for status in &found {
        output.result("status", status);
        output.line(brief(status));
    }
    let is_root = kernel_files::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    uninspected_text(&uninspected, is_root).into_iter().for_each(|text| output.warn(text));
    Ok(())
}

/// Limit of processes that are named with one reason.
const NAMED_MAX: usize = 20;

/// Describes the processes that could not be inspected: for root, which has every ordinary permission, by number and reason.
fn uninspected_text(uninspected: &[(Pid, String)], is_root: bool) -> Vec<String> {
    if !is_root && !uninspected.is_empty() {
        return vec![format!("{} processes could not be inspected: run as root to list all", uninspected.len())];
    }
    let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (pid, reason) in uninspected {
        by_reason.entry(reason).or_default().push(pid.to_string());
    }
    let text = |(reason, pids): (&str, Vec<String>)| {
        let more = pids.len().saturating_sub(NAMED_MAX);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let named = pids[..pids.len().min(NAMED_MAX)].join(", ");
        format!("could not inspect process {named}{more}: {reason}")
    };
    by_reason.into_iter().map(text).collect()
}

/// Labels and value of one process or patch.
type Sample = (Vec<(&'static str, String)>, u64);

/// Formats the exposition format 0.0.4: each metric's help, type and samples together.
fn exposition(found: &[Status], uninspected: usize, unknown: usize) -> String {
    let process = |status: &Status| vec![("pid", status.pid.to_string()), ("process", status.name.clone())];
    let each = |value: &dyn Fn(&Status) -> u64| -> Vec<Sample> {
        found.iter().map(|status| (process(status), value(status))).collect()
    };
    let patches = found.iter().flat_map(|status| {
        status.patches.iter().map(move |patch| {
            let mut labels = process(status);
            labels.push(("patch", patch.name.clone()));
            labels.push(("module", patch.module.clone()));
            labels.push(("build_id", patch.build_id.clone()));
            labels.push(("cves", patch.cves.join(",")));
            (labels, u64::from(status.generation))
        })
    });
    let mut text = String::new();
    let mut metric = |name: &str, help: &str, samples: Vec<Sample>| {
        let _ = writeln!(text, "# HELP stillpoint_{name} {help}\n# TYPE stillpoint_{name} gauge");
        for (labels, value) in samples {
            let labels: Vec<String> =
                labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escape(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(text, "stillpoint_{name}{labels} {value}");
        }
    };
    metric("patch_generation", "Active live patches; the value is the generation of the process.", patches.collect());
    metric("process_patches", "Number of active live patches in a process.", each(&|s| s.patches.len() as u64));
    metric(
        "process_transition_open",
        "1 while a transition is in progress, or was left unfinished by a tool that was killed.",
        each(&|s| s.unfinished.is_some().into()),
    );
    metric(
        "process_entries_damaged",
        "Patched entries with unexpected bytes.",
        each(&|s| s.entries.iter().filter(|e| !e.verified).count() as u64),
    );
    metric("process_patch_bytes", "Memory of patches in bytes, active or not.", each(&|s| s.bytes_kept));
    metric("processes_unseen", "Processes that could not be inspected.", vec![(Vec::new(), uninspected as u64)]);
    metric("processes_unclear", "Processes whose patches are unknown.", vec![(Vec::new(), unknown as u64)]);
    text
}

pub(super) fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn status(name: &str) -> Status {
        Status {
            pid: 7,
            name: name.into(),
            generation: 3,
            unfinished: None,
            patches: Vec::new(),
            entries: Vec::new(),
            threads: Vec::new(),
            traced: false,
            points: None,
            generations: vec![],
            bytes_kept: 4096,
            ledger_bytes: 100,
        }
    }

    #[test]
    fn root_is_not_told_to_be_root() {
        let (lacking, left) = ("CAP_SYS_PTRACE is missing", "kernel.yama.ptrace_scope is 3");
        let found: Vec<_> = [(3, left), (7, lacking), (9, lacking)].map(|(pid, why)| (Pid(pid), why.into())).into();
        let text = uninspected_text(&found, true);
        let wanted = [
            "could not inspect process 7, 9: CAP_SYS_PTRACE is missing",
            "could not inspect process 3: kernel.yama.ptrace_scope is 3",
        ];
        assert_eq!(text, wanted);
        let many: Vec<_> = (1..=22).map(|pid| (Pid(pid), lacking.into())).collect();
        assert!(uninspected_text(&many, true)[0].contains("19, 20 and 2 more: "));
        assert_eq!(uninspected_text(&found, false), ["3 processes could not be inspected: run as root to list all"]);
        assert_eq!(uninspected_text(&[], false), [""; 0]);
    }

    #[test]
    fn labels_are_escaped_and_metrics_keep_together() {
        let text = exposition(&[status("a \"b\\"), status("c\nd")], 2, 1);
        assert!(text.contains("stillpoint_process_patch_bytes{pid=\"7\",process=\"a \\\"b\\\\\"} 4096\n"), "{text}");
        assert!(text.contains("process=\"c\\nd\"} 0\n"), "{text}");
        assert!(text.contains("stillpoint_processes_unseen 2\n"), "{text}");
        assert!(text.ends_with("stillpoint_processes_unclear 1\n"), "{text}");
        let types = text.lines().filter(|line| line.starts_with("# TYPE")).count();
        let helps = text.lines().filter(|line| line.starts_with("# HELP")).count();
        assert_eq!((types, helps), (7, 7), "{text}");
    }
}
