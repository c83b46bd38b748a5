//! `stillpoint patch status`: patches of a process, verified against its memory.

use super::processes::Processes;
use super::sweep::{Kind, Sweep};
use super::wave::{Pace, Step};
use crate::output::{Exit, Failure, Output};
use std::sync::{Mutex, PoisonError};
use stillpoint_patch_engine::{Status, status};

/// Arguments of `stillpoint patch status`.
#[derive(clap::Args)]
#[command(mut_arg("all", |arg| arg.help(ALL_HELP)))]
pub(crate) struct Args {
    #[command(flatten)]
    processes: Processes,
}

/// Help of `--all`, which needs no patch here.
const ALL_HELP: &str = "All processes of this machine that carry patches";

/// Runs `stillpoint patch status`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    args.processes.refuse_two_selections()?;
    let damaged = Mutex::new(Vec::new());
    let show = |pid| {
        let status = status(pid)?;
        output.result("status", &status);
        print(&status, output);
        let entries = status.entries.iter().filter(|e| !e.verified).map(|e| (pid, e.function.clone()));
        damaged.lock().unwrap_or_else(PoisonError::into_inner).extend(entries);
        Ok(())
    };
    let shown = match args.processes.search(None)? {
        None => args.processes.each(show),
        Some(search) => {
            let all = args.processes.is_only_all();
            Sweep {
                subject: args.processes.subject(None),
                participle: "shown",
                needs_one: !all,
                kind: Kind::Show,
                find: &|| if all { search.patched(None) } else { search.run() },
            }
            .run(&Pace::single(), output, |found, _| show(found.pid).map(|()| Step::Done))
            .result()
        }
    };
    let damaged = damaged.into_inner().unwrap_or_else(PoisonError::into_inner);
    shown?;
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
        let data = patch.data.iter().map(|data| &data.name);
        let changed: Vec<&str> = patch.functions.iter().chain(data).map(String::as_str).collect();
        output.line(format_args!("  {}{cves}: {} ({}{signer})", patch.name, changed.join(", "), patch.module));
        for data in patch.data.iter().filter(|data| !data.unchanged) {
            let (name, at) = (&data.name, &data.address);
            output.line(format_args!("    the program has changed {name} at {at} since: a revert is refused"));
        }
    }
    let verified = status.entries.iter().filter(|e| e.verified).count();
    if !status.entries.is_empty() {
        let reverted = status.entries.iter().all(|e| e.patch.is_none()) && status.unfinished.is_none();
        let what = if reverted { "hold the shipped code" } else { "verified against memory" };
        output.line(format_args!("  entries: {verified} of {} {what}", status.entries.len()));
    }
    for entry in status.entries.iter().filter(|e| !e.verified) {
        output.line(format_args!("    {} at {} has unexpected contents", entry.function, entry.address));
    }
    if let Some(text) = threads_text(status) {
        output.line(format_args!("  {text}"));
    }
    for generation in &status.generations {
        let (number, state, threads, pages) =
            (generation.number, &generation.state, generation.threads, generation.pages);
        output.line(format_args!("  address-space generation {number} ({state}): {threads} threads, {pages} pages"));
    }
    print_points(status, output);
    output.line(format_args!("  memory: {} bytes of patches, {} of ledger", status.bytes_kept, status.ledger_bytes));
}

/// Describes which code the threads run. Outside of a transition every entry leads all threads to the same code, and words do not count:
/// a thread that started after the transition has none.
fn threads_text(status: &Status) -> Option<String> {
    let all = status.threads.len();
    if all == 0 || status.ledger_bytes == 0 {
        return None;
    }
    if status.unfinished.is_none() && status.entries.iter().any(|entry| !entry.verified) {
        return Some(format!("threads: {all}; their code is unknown, because entries have unexpected contents"));
    }
    let code = match (&status.unfinished, status.patches.is_empty()) {
        (Some(open), _) => format!("the code of transition {}", open.transition),
        (None, true) => "the shipped code".to_owned(),
        (None, false) => "the new code".to_owned(),
    };
    let (there, unread) = match &status.unfinished {
        None => (all, 0),
        Some(open) if open.phase == "resting" => (all.saturating_sub(open.staying.len()), 0),
        // Threads then have their code by the pages that they see; the lines of the address-space generations count them.
        Some(_) if !status.generations.is_empty() => return None,
        Some(open) => {
            let unread =
                if status.traced { status.threads.iter().filter(|t| t.transition.is_none()).count() } else { 0 };
            (status.threads.iter().filter(|t| t.transition == Some(open.transition)).count(), unread)
        }
    };
    let unread = if unread == 0 {
        String::new()
    } else {
        format!("; {unread} were not examined, because another tool traces them")
    };
    Some(match (there, all) {
        (1, 1) => format!("its only thread runs {code}"),
        (there, all) if there == all => format!("all {all} threads run {code}"),
        (there, all) => format!("{there} of {all} threads run {code}{unread}"),
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_patch_engine::{EntryStatus, PatchStatus, ThreadStatus, UnfinishedTransition};

    /// A process after transition 3, whose threads have these words.
    fn status(words: &[Option<u32>]) -> Status {
        let thread =
            |(at, word): (usize, &Option<u32>)| ThreadStatus { tid: at as i32, transition: *word, registered: None };
        Status { threads: words.iter().enumerate().map(thread).collect(), ..super::super::list::tests::status("a") }
    }

    fn transition(phase: &str, staying: Vec<i32>) -> Option<UnfinishedTransition> {
        let (operation, phase) = ("apply".to_owned(), phase.to_owned());
        Some(UnfinishedTransition { transition: 4, operation, phase, staying, may_stay: Vec::new() })
    }

    #[test]
    fn outside_of_a_transition_all_threads_run_the_same_code() {
        let mut status = status(&[Some(3), Some(2), None]);
        assert_eq!(threads_text(&status).as_deref(), Some("all 3 threads run the shipped code"));
        status.patches.push(PatchStatus {
            name: "fix".into(),
            digest: String::new(),
            description: String::new(),
            cves: Vec::new(),
            module: String::new(),
            build_id: String::new(),
            functions: Vec::new(),
            data: Vec::new(),
            bytes: 0,
            scope: stillpoint_patch_format::Scope::ThreadLocal,
            signer: None,
            placed_at_s: 0,
        });
        assert_eq!(threads_text(&status).as_deref(), Some("all 3 threads run the new code"));
        status.threads.truncate(1);
        assert_eq!(threads_text(&status).as_deref(), Some("its only thread runs the new code"));
        status.threads.clear();
        assert_eq!(threads_text(&status), None);
    }

    #[test]
    fn threads_behind_an_entry_with_unexpected_contents_run_unknown_code() {
        let mut status = status(&[Some(3), Some(3)]);
        let entry = |verified| EntryStatus { verified, address: "0x1000".into(), function: "f".into(), patch: None };
        status.entries = vec![entry(true)];
        assert_eq!(threads_text(&status).as_deref(), Some("all 2 threads run the shipped code"));
        status.entries.push(entry(false));
        let unknown = "threads: 2; their code is unknown, because entries have unexpected contents";
        assert_eq!(threads_text(&status).as_deref(), Some(unknown));
    }

    #[test]
    fn during_a_transition_the_threads_that_have_migrated_are_counted() {
        let mut status = status(&[Some(4), Some(3), None]);
        status.unfinished = transition("migrating", Vec::new());
        assert_eq!(threads_text(&status).as_deref(), Some("1 of 3 threads run the code of transition 4"));
        status.traced = true;
        let traced =
            "1 of 3 threads run the code of transition 4; 1 were not examined, because another tool traces them";
        assert_eq!(threads_text(&status).as_deref(), Some(traced));
        status.unfinished = transition("resting", vec![2]);
        assert_eq!(threads_text(&status).as_deref(), Some("2 of 3 threads run the code of transition 4"));
    }
}
