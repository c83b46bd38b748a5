//! `stillpoint patch status`: patches of a process, verified against its memory.

use super::processes::Processes;
use crate::output::{Exit, Failure, Output};
use stillpoint_patch_engine::{Status, status};

/// Arguments of `stillpoint patch status`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch status"))]
pub(crate) struct Args {
    #[command(flatten)]
    processes: Processes,
}

/// Runs `stillpoint patch status`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let mut damaged = Vec::new();
    args.processes.each(|pid| {
        let status = status(pid)?;
        output.result("status", &status);
        print(&status, output);
        damaged.extend(status.entries.iter().filter(|e| !e.verified).map(|e| (pid, e.function.clone())));
        Ok(())
    })?;
    match damaged.first() {
        None => Ok(()),
        Some((pid, function)) => Err(Failure {
            exit: Exit::Unknown,
            error: anyhow::anyhow!("the entry of {function} in process {pid} differs from the ledger"),
            state: "another program wrote there, for example a uprobe or a debugger".into(),
            hint: Some("remove the probe".into()),
        }),
    }
}

fn print(status: &Status, output: &Output) {
    output.line(format_args!("process {} ({}): generation {}", status.pid, status.name, status.generation));
    if let Some(open) = status.unfinished.as_ref().filter(|open| open.phase == "resting") {
        let threads: Vec<String> = open.staying.iter().map(ToString::to_string).collect();
        output.line(format_args!(
            "  transition {} ({}) is complete for all threads but {}, which may stay in {}",
            open.transition,
            open.operation,
            threads.join(", "),
            open.may_stay.join(", ")
        ));
    } else if let Some(open) = &status.unfinished {
        output.line(format_args!(
            "  transition {} ({}) is unfinished, {}: another tool is working on it, or was killed",
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
        output.line(format_args!("    {} at {} has unexpected contents", entry.function, entry.address));
    }
    let not_migrated = status.threads.iter().filter(|t| t.transition.is_none_or(|n| n < status.generation)).count();
    if !status.threads.is_empty() && status.ledger_bytes > 0 {
        output.line(format_args!(
            "  threads: {}, of them {} migrated in an older transition or started later",
            status.threads.len(),
            not_migrated
        ));
    }
    for generation in &status.generations {
        let (number, state, threads, pages) =
            (generation.number, &generation.state, generation.threads, generation.pages);
        output.line(format_args!("  address-space generation {number} ({state}): {threads} threads, {pages} pages"));
    }
    print_points(status, output);
    output.line(format_args!("  memory: {} bytes of patches, {} of ledger", status.bytes_kept, status.ledger_bytes));
}

/// Prints the state of threads that a program with libstillpoint reports.
fn print_points(status: &Status, output: &Output) {
    let Some(points) = &status.points else { return };
    if points.priorities == 0 {
        return output.line("  quiescence points: libstillpoint is mapped, but sp_init was never called");
    }
    let counted = match points.program_threads {
        0 => String::new(),
        counted => format!(", {counted} by the count of the program"),
    };
    output.line(format_args!("  quiescence points: {} threads registered{counted}", points.registered));
    if let Some(request) = &points.request {
        let group = request.group.as_ref().map(|name| format!(" of group {name}")).unwrap_or_default();
        output.line(format_args!(
            "  request ({}{group}) by process {}: {} blocked, {} awaited, {} ms left",
            request.mode, request.patcher_pid, request.blocked, request.awaited, request.left_ms
        ));
    }
    for thread in &status.threads {
        let Some(part) = &thread.registered else { continue };
        let group = part.group.as_ref().map(|name| format!(", group {name}")).unwrap_or_default();
        let generation = thread.transition.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let state = format!("{:?}", part.state).to_lowercase();
        let blocks = if part.blocks { ", awaited" } else { "" };
        output.line(format_args!(
            "    {:>7} {:<15} generation {generation}, priority {}{group}, {state}{blocks}",
            thread.tid, part.name, part.priority
        ));
    }
}

/// One-line summary, for `list`.
pub(crate) fn brief(status: &Status) -> String {
    let names: Vec<&str> = status.patches.iter().map(|p| p.name.as_str()).collect();
    let open = if status.unfinished.is_some() { ", a transition is unfinished" } else { "" };
    let names = if names.is_empty() { "none active".to_owned() } else { names.join(", ") };
    format!("{} {} generation {}: {names}{open}", status.pid, status.name, status.generation)
}
