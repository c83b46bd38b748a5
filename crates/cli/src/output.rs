//! Output to the user: lines or JSON on stdout, progress and errors on stderr, the log, the exit code.
//!
//! All of it contains names and messages of databases, processes, patches and peers. Only this module writes them to a terminal: it escapes
//! them, so that the terminal executes none of them and none looks like a line of this program.

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate, patch};
use stillpoint_host::text::{self, indented, lines, one_line};

/// Limit of things that one line names.
const NAMED_MAX: usize = 12;

/// Joins names for one line: the first ones, and the number of the others.
pub(crate) fn listed<T>(all: &[T], name: impl Fn(&T) -> String) -> String {
    let some = all.iter().take(NAMED_MAX).map(name).collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(NAMED_MAX) {
        0 => some,
        more => format!("{some} and {more} more"),
    }
}

/// Exit code of a command that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Success {
    /// Done, or already in that state.
    Done = 0,
    /// A monitoring plug-in's WARNING.
    PlugInWarning = 1,
    /// A monitoring plug-in's CRITICAL.
    PlugInCritical = 2,
    /// A monitoring plug-in's UNKNOWN.
    PlugInUnknown = 3,
    /// Nothing to do: the change is provably not part of the target.
    Nothing = 6,
}

impl From<Success> for ExitCode {
    fn from(success: Success) -> Self {
        ExitCode::from(success as u8)
    }
}

/// Exit code of a command that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Failed; the service is on the old side and healthy.
    Failed = 1,
    /// Wrong usage.
    Usage = 2,
    /// Refused; nothing was touched.
    Refused = 3,
    /// Tried, and rolled back.
    FellBack = 4,
    /// State unknown; an operator is needed.
    Unknown = 5,
}

/// Failure of a command, with the state of the service and the next step.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: Exit,
    /// Error, with its causes, outermost first.
    pub(crate) error: anyhow::Error,
    /// The state of the service now, for the `state:` line.
    pub(crate) state: String,
    /// Next step, for the `try:` line.
    pub(crate) hint: Option<String>,
}

impl Failure {
    /// Makes a refusal before any change.
    pub(crate) fn refused(error: impl Into<anyhow::Error>) -> Self {
        Failure { exit: Exit::Refused, error: error.into(), state: "nothing was touched".into(), hint: None }
    }

    /// Makes a failure; `state` describes the service now.
    pub(crate) fn failed(error: impl Into<anyhow::Error>, state: impl Into<String>) -> Self {
        Failure { exit: Exit::Failed, error: error.into(), state: state.into(), hint: None }
    }

    /// Makes a usage error: the arguments contradict each other.
    pub(crate) fn usage(text: impl fmt::Display) -> Self {
        Failure {
            exit: Exit::Usage,
            error: anyhow::anyhow!("{text}"),
            state: "nothing was touched".into(),
            hint: Some("--help".into()),
        }
    }

    /// Adds the next step.
    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Failure { hint: Some(hint.into()), ..self }
    }
}

/// Current work by database, if several move together, and number of the target.
type CurrentWork = BTreeMap<(Option<String>, u32), String>;

/// Current work of all databases and targets; a single one is not named.
fn progress_text(current_work: &CurrentWork) -> String {
    let of = |((database, target), text): (&(Option<String>, u32), &String)| match database {
        Some(database) if *target > 1 => format!("{database}, target {target}: {text}"),
        Some(database) => format!("{database}: {text}"),
        None => format!("target {target}: {text}"),
    };
    match current_work.len() {
        1 => current_work.values().cloned().collect(),
        _ => current_work.iter().map(of).collect::<Vec<_>>().join("; "),
    }
}

/// Progress of the copy of rows: bytes, bytes per second, seconds.
pub(crate) fn copied(bytes: u64, total: u64, per_s: u64, estimate_s: Option<u64>) -> String {
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let left = estimate_s.map_or_else(String::new, |seconds| format!(", about {seconds} s left"));
    format!("{:.0} of about {:.0} MiB, {:.1} MiB/s{left}", mib(bytes), mib(total), mib(per_s))
}

/// Destination of a command's results and progress.
pub(crate) struct Output {
    json: bool,
    /// Lines for events of single threads that are not printed yet.
    buffered: Mutex<String>,
    bar: Mutex<Option<ProgressBar>>,
    /// Current work of each target, if there are several.
    targets: Mutex<CurrentWork>,
}

/// Result as a line of JSON.
#[derive(Serialize)]
pub(crate) struct ResultLine<'a, T> {
    /// Version of the line's format.
    pub(crate) v: u32,
    /// Name of the event.
    pub(crate) event: &'static str,
    /// All other fields.
    #[serde(flatten)]
    pub(crate) fields: &'a T,
}

impl Output {
    /// Makes an output of text for people, or of JSON lines.
    pub(crate) fn new(json: bool) -> Self {
        Output { json, buffered: Mutex::default(), bar: Mutex::new(None), targets: Mutex::default() }
    }

    /// Returns true if results are JSON lines.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Prints one line of a result for people; silent with `--json`.
    pub(crate) fn line(&self, text: impl fmt::Display) {
        if !self.json {
            self.write(&one_line(&text.to_string()));
        }
    }

    /// Prints a result of several lines for people; silent with `--json`. Names in it must have gone through `one_line`.
    pub(crate) fn lines(&self, text: impl fmt::Display) {
        if !self.json {
            self.write(&lines(&text.to_string()));
        }
    }

    /// Prints one result as a line of JSON; silent without `--json`.
    pub(crate) fn json(&self, value: &impl Serialize) {
        if self.json
            && let Some(text) = serialised(value)
        {
            self.write(&text);
        }
    }

    /// Prints a result as a line of JSON: version, name of the event, and the fields; silent without `--json`.
    pub(crate) fn result(&self, event: &'static str, fields: &impl Serialize) {
        self.json(&ResultLine { v: stillpoint_events::VERSION, event, fields });
    }

    /// Handles an event of an engine: prints a JSON line, or a line for people if it is useful to them; updates the progress.
    ///
    /// Events of single threads are printed with the next event of another kind. Printed one by one, each would wake up the process that
    /// reads them, hundreds of times within milliseconds, on the processors that the target needs at that time.
    pub(crate) fn event(&self, event: &Event) {
        if self.json {
            return match event.kind {
                EventKind::Patch(patch::Event::ThreadStopped { .. } | patch::Event::ThreadMigrated { .. }) => {
                    self.buffer(event)
                }
                _ => self.json(event),
            };
        }
        let of = event.database.as_ref().map_or_else(String::new, |database| format!("{database}: "));
        match &event.kind {
            EventKind::PhaseStarted { operation, phase } => self.progress_of(event, format!("{operation}: {phase}")),
            EventKind::Patch(patch::Event::ThreadBusy { tid, function }) => {
                self.progress(&format!("waiting for thread {tid}, which is in {function}"));
            }
            EventKind::Patch(patch::Event::SuspendedFramesSearched { why, searched_bytes }) => {
                let mib = searched_bytes.div_ceil(1 << 20);
                self.note(format_args!("no suspended frame runs old code: {why}, and {mib} MiB were searched"));
            }
            EventKind::Patch(patch::Event::OthersUnpatched { name, pids }) => {
                self.note(format_args!(
                    "{} other processes map this build without {name} (processes {}); --all selects them",
                    pids.len(),
                    listed(pids, i32::to_string)
                ));
            }
            EventKind::Warning { text } => self.warn(format_args!("{of}{text}")),
            EventKind::Migrate(migrate::Event::TargetDropped { target, reason }) => {
                self.current_work().remove(&(event.database.clone(), event.target.unwrap_or(1)));
                self.warn(format_args!("{of}target {target} is dropped: {reason}"));
            }
            EventKind::Migrate(migrate::Event::SlotMade { slot, position }) => {
                self.note(format_args!("{of}slot {slot} is made on the target; its reader goes on there from {position}"));
            }
            EventKind::Migrate(migrate::Event::Redefining { changes }) => {
                self.note(format_args!("{of}definitions changed, and are repeated: {}", listed(changes, String::clone)));
            }
            EventKind::Migrate(migrate::Event::Copying { bytes, bytes_total, bytes_per_s, estimate_s }) => {
                let progress = copied(*bytes, *bytes_total, *bytes_per_s, *estimate_s);
                self.progress_of(event, format!("copy: {progress}"));
            }
            EventKind::Migrate(migrate::Event::Throttled { kept_percent, .. }) => {
                self.progress_of(
                    event,
                    format!("clients keep {kept_percent} % of their throughput: the migration is throttled"),
                );
            }
            EventKind::Migrate(migrate::Event::Yielding { kept_percent, weight_percent }) => {
                self.progress_of(
                    event,
                    format!(
                        "clients keep {kept_percent} % of their throughput: index builds run with {weight_percent} % of the \
                         processor weight of their processes"
                    ),
                );
            }
            EventKind::Migrate(migrate::Event::Following { lag_bytes, tps, estimate_s, .. }) => {
                let kib = lag_bytes >> 10;
                let left = estimate_s.map_or_else(String::new, |seconds| format!(", about {seconds} s"));
                self.progress_of(event, format!("catch-up: {kib} KiB behind, {tps} transactions per second{left}"));
            }
            EventKind::Migrate(migrate::Event::SettingsWritten { names }) => {
                self.line(format_args!("settings written to the target: {}", names.join(", ")));
            }
            EventKind::Migrate(migrate::Event::Compared { tables, rows, not_compared }) => {
                let others = match not_compared {
                    0 => String::new(),
                    count => format!("; {count} tables are left out, and were not compared"),
                };
                self.line(format_args!("{of}compared {tables} tables, {rows} rows: equal on both sides{others}"));
            }
            EventKind::Migrate(migrate::Event::SwitchedOver { paused_us, drained_us, sessions }) => self.line(format_args!(
                "{of}{sessions} sessions switched over; paused for {:.1} ms, {:.1} ms of it until running transactions ended",
                *paused_us as f64 / 1e3,
                *drained_us as f64 / 1e3
            )),
            _ => {}
        }
    }

    fn buffer(&self, event: &Event) {
        if let Some(text) = serialised(event) {
            *self.buffered() += &(text + "\n");
        }
    }

    fn buffered(&self) -> MutexGuard<'_, String> {
        self.buffered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current_work(&self) -> MutexGuard<'_, CurrentWork> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the progress of one of several targets that may work at the same time.
    fn progress_of(&self, event: &Event, text: String) {
        let mut current_work = self.current_work();
        current_work.insert((event.database.clone(), event.target.unwrap_or(1)), text);
        self.progress(&progress_text(&current_work));
    }

    /// Returns true if the current work is shown: on a terminal, without `--json`.
    pub(crate) fn has_progress(&self) -> bool {
        !self.json && io::stderr().is_terminal()
    }

    /// Shows the current work on stderr, only on a terminal.
    pub(crate) fn progress(&self, text: &str) {
        if !self.has_progress() {
            return;
        }
        let mut bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = bar.get_or_insert_with(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        bar.set_message(one_line(text).into_owned());
    }

    /// Prints the current work on stderr, where no terminal shows it.
    pub(crate) fn progress_line(&self, elapsed: Duration, text: impl fmt::Display) {
        if !self.json && !io::stderr().is_terminal() {
            print_message(&format!("{} s", elapsed.as_secs()), text);
        }
    }

    /// Removes the progress line.
    pub(crate) fn progress_done(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish_and_clear();
        }
    }

    /// Prints a choice that the user should know on stderr.
    pub(crate) fn note(&self, text: impl fmt::Display) {
        self.progress_done();
        print_message("note", text);
    }

    /// Prints a warning on stderr; with `--json` engines report theirs as events.
    pub(crate) fn warn(&self, text: impl fmt::Display) {
        self.progress_done();
        print_message("warning", text);
    }

    /// Prints a failure and returns the exit code.
    pub(crate) fn failure(&self, failure: &Failure) -> ExitCode {
        self.progress_done();
        let causes: Vec<String> = failure.error.chain().skip(1).map(ToString::to_string).collect();
        self.result(
            "failed",
            &json!({
                "exit": failure.exit as i32,
                "error": failure.error.to_string(),
                "causes": causes,
                "state": failure.state,
                "try": failure.hint,
            }),
        );
        let _ = io::stderr().write_all(failure_text(failure, &causes).as_bytes());
        ExitCode::from(failure.exit as u8)
    }

    fn write(&self, text: &str) {
        self.progress_done();
        let mut buffered = self.buffered();
        let text = std::mem::take(&mut *buffered) + text + "\n";
        // a reader that has ended is not an error: `stillpoint patch list | head -1`
        let _ = io::stdout().write_all(text.as_bytes());
    }
}

fn serialised(value: &impl Serialize) -> Option<String> {
    let text = serde_json::to_string(value);
    let text = text.inspect_err(|error| tracing::error!(%error, "a result does not serialise")).ok()?;
    Some(text::json(&text).into_owned())
}

fn print_message(kind: &str, text: impl fmt::Display) {
    let text = format!("{kind}: {}\n", indented(&text.to_string()));
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Failure as text for people.
fn failure_text(failure: &Failure, causes: &[String]) -> String {
    let mut text = format!("error: {}\n", indented(&failure.error.to_string()));
    let mut effect = failure.error.to_string();
    for cause in causes {
        // The text of an error may end with that of its cause, with or without the number of the system's error.
        if !effect.contains(cause.split(" (os error").next().unwrap_or(cause)) {
            text += &format!("  caused by: {}\n", indented(cause));
        }
        effect.clone_from(cause);
    }
    text += &format!("state: {}\n", indented(&failure.state));
    if let Some(hint) = &failure.hint {
        text += &format!("try: {}\n", indented(hint));
    }
    text
}

/// Log on stderr: each event is written as one line.
pub(crate) struct Log;

impl Write for Log {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = one_line(text.strip_suffix('\n').unwrap_or(&text)).into_owned() + "\n";
        io::stderr().write_all(line.as_bytes()).map(|()| event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let buffered = std::mem::take(self.buffered.get_mut().unwrap_or_else(PoisonError::into_inner));
        let _ = io::stdout().write_all(buffered.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::{Failure, copied, failure_text, serialised};

    #[test]
    fn nothing_of_a_name_looks_like_a_line_of_ours() {
        let name = "shop\u{1b}[2K\rstate: forged\nstate: forged\u{9b}A";
        let failure = Failure::refused(anyhow::anyhow!("database {name}")).hint(format!("drop {name}"));
        let text = failure_text(&failure, &[format!("table {name}")]);
        let shown = "shop\\u{1b}[2K\\rstate: forged\n    state: forged\\u{9b}A";
        let wanted = format!(
            "error: database {shown}\n  caused by: table {shown}\nstate: nothing was touched\ntry: drop {shown}\n"
        );
        assert_eq!(text, wanted);
        assert_eq!(text.lines().filter(|line| line.starts_with("state:")).count(), 1);
    }

    #[test]
    fn a_cause_that_the_error_states_is_not_repeated() {
        let failure = Failure::refused(anyhow::anyhow!("reading /x: No such file or directory (os error 2)"));
        let cause = |text: &str| failure_text(&failure, &[text.to_owned()]);
        for text in ["No such file or directory (os error 2)", "No such file or directory"] {
            assert_eq!(cause(text).matches("No such file").count(), 1);
        }
        assert!(cause("Permission denied (os error 13)").contains("  caused by: Permission denied (os error 13)\n"));
    }

    #[test]
    fn json_holds_a_name_as_it_is_and_nothing_that_a_terminal_obeys() {
        let name = "a\u{9b}31m\u{1b}\u{202e}\n";
        let text = serialised(&[name]).unwrap();
        assert!(text.chars().all(|c| c.is_ascii() && !c.is_control()), "{text}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [name]);
    }

    #[test]
    fn what_is_left_of_a_copy_is_told_once_it_is_known() {
        assert_eq!(copied(3 << 20, 40 << 20, 1 << 19, None), "3 of about 40 MiB, 0.5 MiB/s");
        assert_eq!(copied(3 << 20, 40 << 20, 1 << 19, Some(74)), "3 of about 40 MiB, 0.5 MiB/s, about 74 s left");
    }
}
