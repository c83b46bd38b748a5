//! Operation on all processes of a service: their order, the number at a time, and the overall result.

use super::processes::{Processes, duration, ended, failure, with_pid};
use crate::output::{Exit, Failure, Output};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use stillpoint_patch_engine::{self as engine, IdlePriority, ServiceState};
use stillpoint_patch_tracee::Pid;

/// Number of processes at a time.
#[derive(clap::Args)]
pub(crate) struct Pace {
    /// Number of processes to work on at the same time [default: one for every two processors; with --library or --all one for each].
    #[arg(long, value_name = "N")]
    at_once: Option<std::num::NonZeroUsize>,
    /// Time between one wave of that many processes and the next [default: none].
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pause: Option<Duration>,
}

impl Pace {
    /// Returns the pace of one process after another.
    pub(super) fn single() -> Pace {
        Pace { at_once: Some(std::num::NonZeroUsize::MIN), pause: None }
    }

    /// Returns the number of threads for a sweep of the machine. Most of the time of each process passes while its tracer gives way to other
    /// programs, so several take no longer than one; and no service has all of these processes.
    pub(super) fn sweep_workers(&self) -> usize {
        self.at_once.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |n| n.get())
    }

    /// Returns the number of processes after which there is a pause, out of `count`.
    pub(super) fn wave_len(&self, workers: usize, count: usize) -> usize {
        if self.pause.is_some() { workers } else { count }
    }

    /// Waits before every wave but the first.
    pub(super) fn pause(&self, wave: usize) {
        if let Some(pause) = self.pause.filter(|_| wave > 0) {
            std::thread::sleep(pause);
        }
    }

    /// Returns the number of threads. Half of the processors stay with the service: a thread that traces has priority over all others while
    /// it keeps a thread stopped.
    pub(super) fn workers(&self) -> usize {
        let half = || std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2));
        self.at_once.map_or_else(half, |n| n.get())
    }
}

impl Processes {
    /// Runs `work` on every process, several at a time, but parents before their children: a process that a patched parent forks inherits
    /// the patch. Repeats until no new process has appeared; an ended process is an error only if it was given by its number. A process
    /// that rolls back does not stop the others; when the first of all fails, no other process is changed.
    pub(crate) fn wave(
        &self,
        pace: &Pace,
        output: &Output,
        work: impl Fn(Pid) -> Result<Step, engine::Error> + Sync,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        let mut wave = Wave { named: self.given_by_number(), ..Wave::default() };
        let mut seen = BTreeSet::new();
        let mut quiet = 0;
        'all: while quiet < QUIET_PASSES
            && let Some(new) = self.new_processes(&mut seen)?
        {
            let before = wave.done;
            for generation in generations(new) {
                let len = pace.wave_len(pace.workers(), generation.len()).max(1);
                for (number, part) in generation.chunks(len).enumerate() {
                    pace.pause(number);
                    let results = parallel(pace.workers(), part, &work);
                    for (pid, result) in part.iter().zip(results) {
                        wave.take(*pid, result);
                    }
                    if wave.touched() == 0 && !wave.failures.is_empty() {
                        break;
                    }
                }
                if wave.touched() == 0 && !wave.failures.is_empty() {
                    break 'all;
                }
            }
            // a service that forks without pause always has new processes, all with the patch inherited
            quiet = if wave.done == before { quiet + 1 } else { 0 };
        }
        wave.finish(start.elapsed(), output)
    }
}

/// Number of passes in a row without a process to change that end the wave: two, since a process that ended may have left a child.
const QUIET_PASSES: u32 = 2;

/// Result for one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The process was changed.
    Done,
    /// The process had the requested state already, or there was nothing to do.
    Already,
    /// The process would be changed, if this were no dry run.
    Possible,
}

/// Results for all processes.
#[derive(Debug, Default)]
struct Wave {
    named: bool,
    done: usize,
    already: usize,
    possible: usize,
    ended: usize,
    /// Processes that do not map the library of the patch.
    without: Vec<(Pid, engine::Error)>,
    failures: Vec<(Pid, engine::Error)>,
}

#[derive(Serialize)]
struct WaveLine {
    done: usize,
    already: usize,
    possible: usize,
    ended: usize,
    without: usize,
    failed: usize,
    duration_us: u64,
}

impl Wave {
    fn take(&mut self, pid: Pid, result: Result<Step, engine::Error>) {
        match result {
            Ok(Step::Done) => self.done += 1,
            Ok(Step::Already) => self.already += 1,
            Ok(Step::Possible) => self.possible += 1,
            Err(error) if !self.named && ended(&error) => self.ended += 1,
            Err(error @ engine::Error::NoModule { .. }) if !self.named => self.without.push((pid, error)),
            Err(error) => self.failures.push((pid, error)),
        }
    }

    fn touched(&self) -> usize {
        self.done + self.already + self.possible
    }

    fn finish(mut self, duration: Duration, output: &Output) -> Result<(), Failure> {
        if self.touched() == 0 {
            // no process has the library: so this is not the program that the patch is for
            self.failures.extend(self.without.drain(..).take(1));
        }
        if self.named && self.touched() + self.failures.len() < 2 {
            return self.failures.pop().map_or(Ok(()), |(pid, error)| Err(with_pid(failure(error), pid)));
        }
        output.result(
            "wave",
            &WaveLine {
                done: self.done,
                already: self.already,
                possible: self.possible,
                ended: self.ended,
                without: self.without.len(),
                failed: self.failures.len(),
                duration_us: duration.as_micros() as u64,
            },
        );
        output.line(format_args!("{} in {:.0} ms", self.describe(), duration.as_secs_f64() * 1e3));
        if !self.without.is_empty() {
            output.warn(format_args!(
                "{} processes do not map the library that the patch is for; a process that loads it later runs the \
                 code of the file: then run the command again, or load the library at the start",
                self.without.len()
            ));
        }
        let described = self.describe();
        let touched = self.touched();
        let worst = (0..self.failures.len()).max_by_key(|i| severity(&self.failures[*i].1));
        let Some((pid, error)) = worst.map(|i| self.failures.remove(i)) else { return Ok(()) };
        for (pid, error) in self.failures {
            output.warn(format_args!("process {pid} failed: {:#}", anyhow::Error::from(error)));
        }
        let mut failure = with_pid(failure(error), pid);
        if touched > 0 {
            if matches!(failure.exit, Exit::Refused | Exit::Failed) {
                failure.exit = Exit::FellBack;
            }
            failure.state = format!("{described}; of process {pid}: {}", failure.state);
            failure.hint = Some("run the command again for the others, or revert it in all processes".into());
        }
        Err(failure)
    }

    fn describe(&self) -> String {
        let counts = [
            (self.done, "processes done"),
            (self.already, "had it already"),
            (self.possible, "would be done"),
            (self.without.len(), "do not map the library"),
            (self.ended, "ended during the operation"),
            (self.failures.len(), "failed"),
        ];
        let parts = counts.iter().filter(|(count, what)| *count > 0 || *what == counts[0].1);
        parts.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
    }
}

/// Rank of a failure; the highest one of several is reported.
pub(super) fn severity(error: &engine::Error) -> u8 {
    match error.service_state() {
        ServiceState::Unfinished => 2,
        ServiceState::RolledBack => 1,
        _ => 0,
    }
}

/// Splits processes into parts; the parent of a process is in an earlier part.
fn generations(pids: Vec<Pid>) -> Vec<Vec<Pid>> {
    by_parent(pids, engine::fleet::parent)
}

pub(super) fn by_parent(pids: Vec<Pid>, parent: impl Fn(Pid) -> Option<Pid>) -> Vec<Vec<Pid>> {
    let mut depths: BTreeMap<Pid, usize> = BTreeMap::new();
    let mut generations: Vec<Vec<Pid>> = Vec::new();
    for pid in pids {
        // older ones come first, so a parent's depth is known
        let depth = parent(pid).and_then(|p| depths.get(&p)).map_or(0, |depth| depth + 1);
        depths.insert(pid, depth);
        if generations.len() <= depth {
            generations.resize(depth + 1, Vec::new());
        }
        generations[depth].push(pid);
    }
    generations
}

/// Runs `work` on every item, `workers` at a time; results are in the order of the items.
pub(super) fn parallel<T: Copy + Sync, R: Send>(workers: usize, items: &[T], work: impl Fn(T) -> R + Sync) -> Vec<R> {
    if workers < 2 || items.len() < 2 {
        return items.iter().map(|item| work(*item)).collect();
    }
    let next = AtomicUsize::new(0);
    let run = || {
        // a thread inherits the priority of its creator, but not its restoration
        let _giving_way = IdlePriority::begin();
        let mut results = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { break };
            results.push((at, work(*item)));
        }
        results
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers.min(items.len())).map(|_| scope.spawn(run)).collect();
        let joined = threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.flatten().collect()
    });
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_in_an_earlier_generation() {
        let pids = vec![Pid(10), Pid(11), Pid(12), Pid(20), Pid(13)];
        let parent = |pid: Pid| match pid.0 {
            11 | 12 => Some(Pid(10)),
            20 => Some(Pid(11)),
            13 => Some(Pid(1)),
            _ => None,
        };
        let generations = by_parent(pids, parent);
        assert_eq!(generations, [vec![Pid(10), Pid(13)], vec![Pid(11), Pid(12)], vec![Pid(20)]]);
    }

    #[test]
    fn every_item_is_worked_on_once_and_in_order() {
        for workers in [1, 3, 100] {
            let items: Vec<usize> = (0..40).collect();
            assert_eq!(parallel(workers, &items, |n| n * 2), (0..40).map(|n| n * 2).collect::<Vec<_>>());
        }
        assert_eq!(parallel(4, &[0; 0], |n: usize| n), [0; 0]);
    }
}
