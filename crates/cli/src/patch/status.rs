//! `stillpoint patch status`: what a process carries, verified against its memory.

use super::processes::Processes;
use crate::output::{Exit, Failure, Output};
use serde::Serialize;
use stillpoint_patch_engine::{Status, status};

/// Arguments of `stillpoint patch status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    processes: Processes,
}

#[derive(Serialize)]
pub(crate) struct Line<'a> {
    v: u32,
    event: &'static str,
    #[serde(flatten)]
    status: &'a Status,
}

impl<'a> Line<'a> {
    pub(crate) fn new(status: &'a Status) -> Self {
        Line { v: stillpoint_events::VERSION, event: "status", status }
    }
}

/// Runs `stillpoint patch status`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let mut damaged = Vec::new();
    args.processes.each(|pid| {
        let status = status(pid)?;
        output.json(&Line::new(&status));
        print(&status, output);
        damaged.extend(status.entries.iter().filter(|e| !e.verified).map(|e| (pid, e.function.clone())));
        Ok(())
    })?;
    match damaged.first() {
        None => Ok(()),
        Some((pid, function)) => Err(Failure {
            exit: Exit::Unknown,
            error: anyhow::anyhow!("entry of {function} in process {pid} does not hold what the ledger says"),
            state: "somebody else wrote there, for instance a uprobe or a debugger".into(),
            hint: Some("remove the probe".into()),
        }),
    }
}

fn print(status: &Status, output: &Output) {
    output.line(format_args!("process {} ({}): generation {}", status.pid, status.name, status.generation));
    if let Some(open) = &status.unfinished {
        output.line(format_args!(
            "  transition {} ({}) is open, {}: another tool works on it, or was killed",
            open.transition, open.operation, open.phase
        ));
    }
    if status.patches.is_empty() {
        output.line("  no patch is active");
    }
    for patch in &status.patches {
        let cves = if patch.cves.is_empty() { String::new() } else { format!(" [{}]", patch.cves.join(", ")) };
        let signer = patch.signer.as_ref().map(|s| format!(", signed by {s}")).unwrap_or_default();
        output.line(format_args!("  {}{cves}: {} ({}{signer})", patch.name, patch.functions.join(", "), patch.module));
    }
    let verified = status.entries.iter().filter(|e| e.verified).count();
    if !status.entries.is_empty() {
        output.line(format_args!("  entries: {verified} of {} verified against memory", status.entries.len()));
    }
    for entry in status.entries.iter().filter(|e| !e.verified) {
        output.line(format_args!("    {} at {} holds something else", entry.function, entry.address));
    }
    let behind = status.threads.iter().filter(|t| t.transition.is_none_or(|n| n < status.generation)).count();
    if !status.threads.is_empty() {
        output.line(format_args!(
            "  threads: {}, of them {} went through an older transition or were born later",
            status.threads.len(),
            behind
        ));
    }
    output.line(format_args!("  memory: {} bytes of patches, {} of ledger", status.bytes_kept, status.ledger_bytes));
}

/// For `list`.
pub(crate) fn brief(status: &Status) -> String {
    let names: Vec<&str> = status.patches.iter().map(|p| p.name.as_str()).collect();
    let open = if status.unfinished.is_some() { ", a transition is open" } else { "" };
    let names = if names.is_empty() { "none active".to_owned() } else { names.join(", ") };
    format!("{} {} generation {}: {names}{open}", status.pid, status.name, status.generation)
}
