//! When the machine itself stood still: a virtual one gets no processor for some milliseconds now and then, and whoever
//! measures latencies then measures that.
//!
//! A thread on each processor sleeps, before everybody else when it wakes up, and notes by how much it overslept.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;

const SLEEP: Duration = Duration::from_millis(2);
/// What a wake-up may take: less than this is not noted.
const LATE_NS: u64 = 300_000;

/// The threads that watch.
pub struct Watch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Stall>>>,
}

/// A processor on which nothing ran, not even what comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// When it was over, nanoseconds of `CLOCK_MONOTONIC`.
    pub ended_ns: u64,
    /// For how long.
    pub ns: u64,
}

impl Watch {
    /// Begins to watch every processor that this process may use.
    pub fn start() -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let all = sched_getaffinity(Pid::from_raw(0)).expect("a process may ask for its own processors");
        let processors = (0..CpuSet::count()).filter(|&cpu| all.is_set(cpu).unwrap_or(false));
        let watch = |cpu| {
            let stop = stop.clone();
            std::thread::spawn(move || watch(cpu, &stop))
        };
        let threads = processors.map(watch).collect();
        Watch { stop, threads }
    }

    /// What it saw.
    pub fn finish(self) -> Vec<Stall> {
        self.stop.store(true, Ordering::Relaxed);
        let seen = self.threads.into_iter().flat_map(|thread| thread.join().expect("it does not panic"));
        seen.collect()
    }
}

fn watch(cpu: usize, stop: &AtomicBool) -> Vec<Stall> {
    let mut only = CpuSet::new();
    only.set(cpu).expect("it is in the set");
    sched_setaffinity(Pid::from_raw(0), &only).expect("a thread may go to a processor of its process");
    // Who may not is run soon all the same, as it sleeps most of the time.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -20);
    let mut seen = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let from = now_ns();
        std::thread::sleep(SLEEP);
        let ended_ns = now_ns();
        let ns = (ended_ns - from).saturating_sub(SLEEP.as_nanos() as u64);
        if ns >= LATE_NS {
            seen.push(Stall { ended_ns, ns });
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_lie_in_the_time_watched() {
        let from = now_ns();
        let watch = Watch::start();
        std::thread::sleep(10 * SLEEP);
        let seen = watch.finish();
        assert!(seen.iter().all(|stall| stall.ended_ns - stall.ns >= from && stall.ended_ns <= now_ns()), "{seen:?}");
    }
}
