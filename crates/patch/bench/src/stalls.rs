//! Times in which the machine itself gave a processor to no thread: a virtual machine loses its processors for some
//! milliseconds now and then, which a measurement of latencies includes.
//!
//! A thread on each processor sleeps, with precedence over all others when it wakes up, and records by how much it
//! overslept.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;

const SLEEP: Duration = Duration::from_millis(2);
/// Delay of a wake-up, in nanoseconds, below which it is not recorded.
const LATE_NS: u64 = 300_000;

/// The watching threads.
pub struct Watch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Stall>>>,
}

/// A time in which a processor ran no thread, not even the one with precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// End in nanoseconds of `CLOCK_MONOTONIC`.
    pub ended_ns: u64,
    /// Duration in nanoseconds.
    pub ns: u64,
}

impl Watch {
    /// Starts to watch every processor that this process may use.
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

    /// Ends the threads and returns the stalls.
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
    // A thread without this permission still runs soon, as it sleeps most of the time.
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
