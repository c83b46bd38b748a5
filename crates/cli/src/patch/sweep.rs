//! Operation on all processes of the machine that map a file: search, waves, and the list of what could not be done.

use super::processes::{ended, failure};
use super::wave::{Pace, Step, by_parent, parallel, severity};
use crate::output::{Exit, Failure, Output, listed};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind};
use stillpoint_patch_engine::fleet::{Census, FoundProcess, Mismatch};
use stillpoint_patch_engine::{self as engine, ServiceState, fleet};
use stillpoint_patch_tracee::{Pid, Stat};

/// Number of searches in a row without a process to change that end the sweep: a process that ended may have left a child.
const QUIET_PASSES: u32 = 2;
/// Number of searches that change only processes that are younger than the sweep. A machine on which programs start without pause always has
/// another one, and each of them runs the code of the file.
const LATE_PASSES_MAX: u32 = 6;
/// Interval of the lines of progress where there is no terminal.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Interval of the progress on a terminal.
const REFRESH_INTERVAL: Duration = Duration::from_millis(200);

/// Task of a sweep.
pub(super) struct Sweep<'a> {
    /// File, or patch, by which processes are selected, for people.
    pub(super) subject: String,
    /// Participle for a process that the operation could not be done on: `patched`.
    pub(super) participle: &'static str,
    /// True if no selected process at all is an error.
    pub(super) needs_one: bool,
    /// Kind of the operation.
    pub(super) kind: Kind,
    /// Search for the processes.
    pub(super) find: &'a (dyn Fn() -> Census + Sync),
}

/// Kind of an operation on processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Processes are changed: those that start later are worth a note.
    Change,
    /// Nothing is changed.
    Check,
    /// The state of each process is the only result.
    Show,
}

/// Result of a sweep.
pub(super) struct Settled {
    /// Number of processes that were changed.
    pub(super) done: usize,
    /// Processes that should have been changed and were not, with the reason: one line for each reason.
    pub(super) left: Vec<String>,
    /// Failure, if there are such processes.
    pub(super) failure: Option<Failure>,
}

impl Settled {
    /// Returns the result of a command that is this sweep alone.
    pub(super) fn result(self) -> Result<(), Failure> {
        self.failure.map_or(Ok(()), Err)
    }
}

/// Results of a sweep so far.
#[derive(Default)]
struct Tally {
    selected: usize,
    done: usize,
    already: usize,
    possible: usize,
    ended: usize,
    failures: Vec<(FoundProcess, engine::Error)>,
    /// Findings of the last search beside the processes to work on.
    rest: Census,
    /// Containers with the number of their processes that were worked on.
    containers: BTreeMap<String, usize>,
    /// Paths at which the build that the patch is for is on disk.
    on_disk: BTreeSet<String>,
    /// Paths at which another file has replaced it, as an upgrade of the package does.
    replaced: BTreeSet<String>,
    /// True if programs start without pause.
    is_endless: bool,
}

#[derive(Serialize)]
struct ProcessLine<'a> {
    pid: i32,
    name: &'a str,
    path: &'a str,
    build_id: Option<String>,
    container: Option<String>,
    outcome: &'static str,
    reason: Option<String>,
    duration_us: u64,
}

#[derive(Serialize)]
struct SweepLine {
    done: usize,
    already: usize,
    possible: usize,
    ended: usize,
    failed: usize,
    other_build: usize,
    in_containers: usize,
    uninspected: usize,
    duration_us: u64,
}

impl Sweep<'_> {
    /// Runs `work` on every process, several at a time, but parents before their children: a process that a patched parent forks inherits
    /// the patch. A process on which it fails does not stop the others. Repeats until no new process has appeared.
    pub(super) fn run(
        &self,
        pace: &Pace,
        output: &Output,
        work: impl Fn(&FoundProcess, &mut Vec<Event>) -> Result<Step, engine::Error> + Sync,
    ) -> Settled {
        let start = Instant::now();
        let tally = Mutex::new(Tally::default());
        with_progress(&tally, self, output, start, || {
            let one = |found: &FoundProcess| {
                let begun = Instant::now();
                // Printed when no thread is stopped any more: the reader of the output may be this very process.
                let mut events = Vec::new();
                let result = work(found, &mut events);
                let is_for_text = |event: &&Event| matches!(event.kind, EventKind::Warning { .. });
                let shown = events.iter().filter(|event| output.is_json() || is_for_text(event));
                shown.for_each(|event| output.event(event));
                lock(&tally).take(found, result, begun.elapsed(), output);
            };
            self.passes(pace, &tally, &one);
        });
        let tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.finish(tally, start.elapsed(), output)
    }

    fn passes(&self, pace: &Pace, tally: &Mutex<Tally>, one: &(dyn Fn(&FoundProcess) + Sync)) {
        let begun = Stat::of(Pid(std::process::id() as i32)).map_or(u64::MAX, |stat| stat.start_time);
        let mut handled = HashSet::new();
        let (mut quiet, mut late) = (0, 0);
        while quiet < QUIET_PASSES && late < LATE_PASSES_MAX {
            let mut census = (self.find)();
            let mut new = std::mem::take(&mut census.matching);
            new.retain(|found| handled.insert(found.instance()));
            let before = {
                let mut tally = lock(tally);
                tally.note(&new, census);
                tally.done
            };
            let has_older = new.iter().any(|found| found.start_time <= begun);
            for generation in generations(new) {
                let wave = pace.wave_len(pace.sweep_workers(), generation.len());
                for (number, wave) in generation.chunks(wave.max(1)).enumerate() {
                    pace.pause(number);
                    parallel(pace.sweep_workers(), &wave.iter().collect::<Vec<_>>(), one);
                }
            }
            let changed = lock(tally).done != before;
            quiet = if changed { 0 } else { quiet + 1 };
            late = if changed && !has_older { late + 1 } else { 0 };
        }
        lock(tally).is_endless = late == LATE_PASSES_MAX;
    }

    fn finish(&self, mut tally: Tally, duration: Duration, output: &Output) -> Settled {
        tally.failures.extend(unknown_processes(std::mem::take(&mut tally.rest.unknown)));
        for (found, mismatch) in &tally.rest.mismatching {
            let outcome = if runs(mismatch) { "other-build" } else { "not-executed" };
            output.result("process", &line(found, outcome, Some(describe(mismatch, found)), Duration::ZERO));
        }
        for found in &tally.rest.left_out {
            let reason = "it runs in a container, and --containers was not given".to_owned();
            output.result("process", &line(found, "left-out", Some(reason), Duration::ZERO));
        }
        for pid in &tally.rest.uninspected {
            let reason = "this user may not inspect it".to_owned();
            if let Some(found) = fleet::process(*pid) {
                output.result("process", &line(&found, "uninspected", Some(reason), Duration::ZERO));
            }
        }
        output.result("wave", &tally.summary(duration));
        if self.kind != Kind::Show && (tally.selected > 0 || !tally.rest.mismatching.is_empty()) {
            output.line(format_args!("{} in {:.0} ms", tally.counts(), duration.as_secs_f64() * 1e3));
        }
        self.notes(&tally, output);
        let (count, list) = self.unfinished_list(&tally);
        let found_none = tally.selected == 0 && list.is_empty() && tally.rest.mismatching.is_empty();
        let done = tally.done;
        if list.is_empty() && (!found_none || !self.needs_one) {
            return Settled { done, left: list, failure: None };
        }
        if found_none {
            let error = anyhow::anyhow!("no process maps {}", self.subject);
            let hint = match tally.rest.left_out.len() {
                0 => "`grep -l NAME /proc/[0-9]*/maps` lists the processes that map a file",
                _ => "--containers, for the processes in containers",
            };
            return Settled { done, left: list, failure: Some(Failure::refused(error).hint(hint)) };
        }
        for text in &list {
            output.warn(text);
        }
        Settled { done, left: list, failure: Some(self.failure(tally, count)) }
    }

    /// Returns the processes on which the operation should have been done and was not: their number, and one line for each reason.
    fn unfinished_list(&self, tally: &Tally) -> (usize, Vec<String>) {
        let failed = tally.failures.iter().map(|(found, error)| (who(found), chain(error).join(": ")));
        let other = tally.other_builds().map(|(found, mismatch)| (who(found), describe(mismatch, found)));
        let (mut reasons, mut count) = (Vec::<(String, Vec<String>)>::new(), 0);
        for (who, reason) in failed.chain(other) {
            count += 1;
            match reasons.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, processes)) => processes.push(who),
                None => reasons.push((reason, vec![who])),
            }
        }
        let participle = self.participle;
        let line = |(reason, processes): (String, Vec<String>)| match &processes[..] {
            [process] => format!("process {process} is not {participle}: {reason}"),
            several => format!("processes {} are not {participle}: {reason}", several.join(", ")),
        };
        (count, reasons.into_iter().map(line).collect())
    }

    fn notes(&self, tally: &Tally, output: &Output) {
        for (found, _) in tally.rest.mismatching.iter().filter(|(_, mismatch)| !runs(mismatch)) {
            output.note(format_args!("process {} maps {} and executes nothing of it", who(found), found.path));
        }
        let upgraded: Vec<String> = tally.upgraded().map(|(found, _)| who(found)).collect();
        if !upgraded.is_empty() {
            output.note(format_args!(
                "they map the build that is on disk now, and not the one that the patch is for: processes {}",
                upgraded.join(", ")
            ));
        }
        for (container, count) in &tally.containers {
            output.note(format_args!("container {container}: {count} processes"));
        }
        if !tally.rest.left_out.is_empty() {
            output.note(format_args!(
                "left out, because they run in containers (--containers includes them): processes {}",
                listed(&tally.rest.left_out, who)
            ));
        }
        let uninspected = &tally.rest.uninspected;
        if !uninspected.is_empty() {
            output.warn(format_args!(
                "not included, because this user may not inspect them: processes {}; root may inspect all of its machine",
                listed(uninspected, ToString::to_string)
            ));
        }
        if self.kind != Kind::Change {
            return;
        }
        if tally.is_endless {
            output
                .note("programs that map the file start without pause: those that start from now on are not included");
        }
        for path in &tally.on_disk {
            output.note(format_args!(
                "{path} on disk is the build that the patch is for: programs that start from now on run its code, until \
                 the package is upgraded"
            ));
        }
    }

    /// Returns the failure of a sweep that could not do all.
    fn failure(&self, mut tally: Tally, count: usize) -> Failure {
        let counts = tally.counts();
        let worst = (0..tally.failures.len()).max_by_key(|i| severity(&tally.failures[*i].1));
        let text = format!("{count} processes that map {} are not {}", self.subject, self.participle);
        let mut result = match worst.map(|i| tally.failures.swap_remove(i)) {
            Some((found, error)) => {
                let failed = failure(error);
                let error = failed.error.context(format!("process {}", who(&found))).context(text);
                let state = format!("{counts}; of process {}: {}", found.pid, failed.state);
                Failure { exit: failed.exit, error, state, hint: failed.hint }
            }
            None => Failure { state: counts, ..Failure::refused(anyhow::anyhow!(text)) },
        };
        if tally.done > 0 && matches!(result.exit, Exit::Refused | Exit::Failed) {
            result.exit = Exit::FellBack;
        }
        if count > 1 || result.hint.is_none() {
            let hint = "the same command again for those that can be helped; for the others a restart, after the upgrade of the \
                        package";
            result.hint = Some(hint.into());
        }
        result
    }
}

impl Tally {
    fn note(&mut self, new: &[FoundProcess], rest: Census) {
        self.selected += new.len();
        for found in new {
            if let Some(container) = &found.container {
                *self.containers.entry(container.to_string()).or_default() += 1;
            } else if found.deleted {
                self.replaced.insert(found.path.clone());
            } else if found.build_id.is_some() {
                self.on_disk.insert(found.path.clone());
            }
        }
        self.rest = rest;
    }

    fn take(&mut self, found: &FoundProcess, result: Result<Step, engine::Error>, duration: Duration, output: &Output) {
        let (outcome, reason) = match &result {
            Ok(Step::Done) => ("done", None),
            Ok(Step::Already) => ("already", None),
            Ok(Step::Possible) => ("possible", None),
            Err(error) if is_over(error) => ("ended", None),
            Err(error) => {
                let outcome = match error.service_state() {
                    ServiceState::Untouched | ServiceState::Ended => "refused",
                    ServiceState::OldSide => "failed",
                    ServiceState::RolledBack => "rolled-back",
                    ServiceState::Unfinished => "unfinished",
                };
                (outcome, Some(chain(error).join(": ")))
            }
        };
        output.result("process", &line(found, outcome, reason, duration));
        match result {
            Ok(Step::Done) => self.done += 1,
            Ok(Step::Already) => self.already += 1,
            Ok(Step::Possible) => self.possible += 1,
            Err(error) if is_over(&error) => self.ended += 1,
            Err(error) => self.failures.push((found.clone(), error)),
        }
    }

    /// Returns true for a process that runs the file which has replaced the build that the patch is for: the patch is not for it.
    fn is_upgraded(&self, (found, mismatch): &(FoundProcess, Mismatch)) -> bool {
        runs(mismatch) && !found.deleted && found.container.is_none() && self.replaced.contains(&found.path)
    }

    /// Returns the processes that run a build of which it is unknown if it needs a patch.
    fn other_builds(&self) -> impl Iterator<Item = &(FoundProcess, Mismatch)> {
        self.rest.mismatching.iter().filter(move |found| runs(&found.1) && !self.is_upgraded(found))
    }

    fn upgraded(&self) -> impl Iterator<Item = &(FoundProcess, Mismatch)> {
        self.rest.mismatching.iter().filter(move |found| self.is_upgraded(found))
    }

    fn summary(&self, duration: Duration) -> SweepLine {
        SweepLine {
            done: self.done,
            already: self.already,
            possible: self.possible,
            ended: self.ended,
            failed: self.failures.len(),
            other_build: self.other_builds().count(),
            in_containers: self.rest.left_out.len(),
            uninspected: self.rest.uninspected.len(),
            duration_us: duration.as_micros() as u64,
        }
    }

    fn counts(&self) -> String {
        let counts = [
            (self.done, "processes done"),
            (self.already, "had it already"),
            (self.possible, "would be done"),
            (self.ended, "ended during the operation"),
            (self.failures.len(), "failed"),
            (self.other_builds().count(), "map another build"),
            (self.upgraded().count(), "map the build that is on disk now"),
            (self.rest.left_out.len(), "in containers left out"),
            (self.rest.uninspected.len(), "could not be inspected"),
        ];
        let parts = counts.iter().filter(|(count, what)| *count > 0 || *what == counts[0].1);
        parts.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
    }

    fn progress(&self) -> String {
        let settled = self.done + self.already + self.possible + self.ended + self.failures.len();
        format!("{settled} of {} processes, {} failed", self.selected, self.failures.len())
    }
}

/// Returns true if the process needs no patch any more: it has ended, or runs another program.
fn is_over(error: &engine::Error) -> bool {
    ended(error) || matches!(error, engine::Error::NoModule { .. })
}

/// Returns true if the process runs code of the file.
fn runs(mismatch: &Mismatch) -> bool {
    *mismatch != Mismatch::NotExecuted
}

fn describe(mismatch: &Mismatch, found: &FoundProcess) -> String {
    let path = &found.path;
    let replaced = if found.deleted { ", which is not on disk any more" } else { "" };
    match (mismatch, &found.build_id) {
        (Mismatch::OtherBuild, Some(id)) => format!("it maps another build of the file, {id} ({path}{replaced})"),
        (Mismatch::OtherBuild, None) => {
            format!("it maps another build of the file, without a build-id ({path}{replaced})")
        }
        (Mismatch::OtherKind(kind), _) => format!("it maps another build of the file, {kind} ({path}{replaced})"),
        (Mismatch::PartOnly, _) => format!("it maps only a part of {path}, without its beginning"),
        (Mismatch::NotExecuted, _) => format!("it maps {path} and executes nothing of it"),
    }
}

fn who(found: &FoundProcess) -> String {
    let container = found.container.as_ref().map(|container| format!(" in container {container}")).unwrap_or_default();
    format!("{} ({}){container}", found.pid, found.name)
}

/// Returns an error and its causes; a cause that the text before it contains is not repeated.
fn chain(error: &engine::Error) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let text = error.to_string();
        if !texts.last().is_some_and(|last| last.contains(&text)) {
            texts.push(text);
        }
        cause = error.source();
    }
    texts
}

fn line<'a>(
    found: &'a FoundProcess,
    outcome: &'static str,
    reason: Option<String>,
    duration: Duration,
) -> ProcessLine<'a> {
    ProcessLine {
        pid: found.pid.0,
        name: &found.name,
        path: &found.path,
        build_id: found.build_id.as_ref().map(ToString::to_string),
        container: found.container.as_ref().map(ToString::to_string),
        outcome,
        reason,
        duration_us: duration.as_micros() as u64,
    }
}

fn unknown_processes(unknown: Vec<(Pid, engine::Error)>) -> impl Iterator<Item = (FoundProcess, engine::Error)> {
    unknown.into_iter().filter_map(|(pid, error)| Some((fleet::process(pid)?, error)))
}

/// Splits processes into parts; the parent of a process is in an earlier part.
fn generations(processes: Vec<FoundProcess>) -> Vec<Vec<FoundProcess>> {
    let mut by_pid: BTreeMap<Pid, FoundProcess> = BTreeMap::new();
    let mut order = Vec::new();
    for found in processes {
        order.push(found.pid);
        by_pid.insert(found.pid, found);
    }
    let parts = by_parent(order, fleet::parent);
    parts.into_iter().map(|part| part.into_iter().filter_map(|pid| by_pid.remove(&pid)).collect()).collect()
}

fn lock(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Signal that ends the reports of progress, also if the work has panicked.
#[derive(Default)]
struct End {
    is_over: Mutex<bool>,
    signal: Condvar,
}

struct EndOnDrop<'a>(&'a End);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        *self.0.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.signal.notify_all();
    }
}

impl End {
    /// Waits for the end; returns true if it has come.
    fn wait(&self, limit: Duration) -> bool {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.signal.wait_timeout_while(is_over, limit, |is_over| !*is_over);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Runs `work` and reports its progress meanwhile: on a terminal always, elsewhere a line every ten seconds.
fn with_progress(tally: &Mutex<Tally>, sweep: &Sweep<'_>, output: &Output, start: Instant, work: impl FnOnce()) {
    let end = End::default();
    let report = || {
        let interval = if output.has_progress() { REFRESH_INTERVAL } else { PROGRESS_INTERVAL };
        while !end.wait(interval) {
            let text = format!("{}: {}", sweep.subject, lock(tally).progress());
            if output.has_progress() {
                output.progress(&text);
            } else {
                output.note(format_args!("{text}, {} s", start.elapsed().as_secs()));
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(report);
        let _end = EndOnDrop(&end);
        work();
    });
}
