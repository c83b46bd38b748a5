//! Scheduling of the tracer: it runs before others while it keeps a thread stopped, and gives way to the target at every other time.
//!
//! The obvious way is one high priority throughout. Then the tool, while it links and reads, takes the processor from the very server that
//! it should repair, for milliseconds on a small machine: a thread that wakes up does not preempt an ordinary running thread before the end
//! of its slice. With an ordinary or low priority throughout, a stopped thread stays stopped until the scheduler runs the tool. So the
//! priority changes with the stopped threads.
//!
//! To the kernel the lowest class is a small weight, not the last place. Its weight collects a claim to run while others do, short slices
//! of ours took the protection of their slices from others, and clients waited up to 4 ms for a thread of this class. So the class comes
//! with slices of the usual length, and a thread of it yields after each part of its work (`yield_if_idle_class`). In statements of MariaDB over
//! 0.9 ms in the 30 ms after an operation's start (50 operations of each kind): 0.42 (points) and 0.48 (probes) before, 0.26 and 0.20 since;
//! 0.04 to 0.16 without an operation. Events of single threads are printed together, because each line would wake its reader.

use crate::sys;
use rustix::fd::OwnedFd;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time limit for SCHED_IDLE. On a fully loaded machine a SCHED_IDLE thread never runs: after this time it continues like all others.
const PREPARATION_LIMIT: Duration = Duration::from_millis(50);
/// The same for a tracing thread: new threads and signals wait for it. It starts again when no thread is stopped any more.
const TRACING_LIMIT: Duration = Duration::from_millis(5);
/// Time after the beginning after which it no longer starts again. It is longer than most operations take: they must complete on a fully
/// loaded machine too.
const TRACING_RENEWAL_LIMIT: Duration = Duration::from_millis(30);
/// The same while only idle threads are stopped: after it the tracer runs before all others.
const SPARING_LIMIT: Duration = Duration::from_millis(3);

thread_local! {
    /// End of the time in which the calling OS thread is SCHED_IDLE.
    static IDLE_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Lets other threads use the processor of the calling OS thread, if that is SCHED_IDLE. Call it between steps that take long: see
/// [`sys::yield_processor`].
pub(crate) fn yield_if_idle_class() {
    if IDLE_UNTIL.get().is_some_and(|until| Instant::now() < until) {
        sys::yield_processor();
    }
}

/// Scheduling state of a thread. Each instant is the end of a time of giving way; `None` if it has ended or never began.
#[derive(Debug)]
struct Schedule {
    /// True if a thread is stopped.
    raised: bool,
    /// End of the time in which the thread is SCHED_IDLE while no thread is stopped.
    idle_until: Option<Instant>,
    /// End of the time in which the thread is SCHED_IDLE even while a thread is stopped.
    sparing_until: Option<Instant>,
    /// True if the watching thread must end.
    is_over: bool,
}

/// Scheduling class of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Fifo,
    Default,
    Idle,
}

impl Schedule {
    fn class(&self) -> Class {
        match (self.raised, self.idle_until, self.sparing_until) {
            (true, _, None) => Class::Fifo,
            (true, _, Some(_)) | (false, Some(_), _) => Class::Idle,
            (false, None, _) => Class::Default,
        }
    }

    fn apply(&self, tid: i32) {
        match self.class() {
            Class::Fifo => sys::set_fifo_class(tid),
            Class::Default => drop(sys::set_default_class(tid)),
            Class::Idle => sys::set_idle_class(tid),
        }
    }

    /// Ends the times that are over by now; returns true if there was one.
    fn end(&mut self, now: Instant) -> bool {
        let due = |until: &mut Option<Instant>| until.take_if(|until| *until <= now).is_some();
        due(&mut self.idle_until) | due(&mut self.sparing_until)
    }

    /// Returns the instant at which the next time ends.
    fn next(&self) -> Option<Instant> {
        let sparing_until = self.sparing_until.filter(|_| self.raised);
        self.idle_until.into_iter().chain(sparing_until).min()
    }
}

/// An OS thread that is SCHED_IDLE for a limited time.
#[derive(Debug)]
struct IdleClass {
    schedule: Arc<Mutex<Schedule>>,
    watcher: Option<(Arc<OwnedFd>, JoinHandle<()>)>,
}

fn lock(schedule: &Mutex<Schedule>) -> MutexGuard<'_, Schedule> {
    schedule.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the timer to wake the watching thread at this instant; with `None`, never.
fn arm(timer: &OwnedFd, next: Option<Instant>) {
    let in_time = |next: Instant| next.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
    let value = next.and_then(|next| Timespec::try_from(in_time(next)).ok()).unwrap_or_default();
    let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
    // cannot fail: the timer is ours, and the time is valid
    let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &once);
}

/// Takes the lock; also returns true if the watched thread needed help to release it. No other thread holds it, and a thread that has just
/// become SCHED_IDLE may get no turn to release it.
fn lock_for_watcher(schedule: &Mutex<Schedule>, watched: i32) -> (MutexGuard<'_, Schedule>, bool) {
    let mut helped = false;
    loop {
        match schedule.try_lock() {
            Ok(schedule) => return (schedule, helped),
            Err(TryLockError::Poisoned(schedule)) => return (schedule.into_inner(), helped),
            Err(TryLockError::WouldBlock) => {
                // repeat it, because the thread may be about to become SCHED_IDLE
                sys::set_default_class(watched);
                helped = true;
                thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// Ends the times that the watched thread cannot end by itself, because it may get no processor.
fn watch(timer: &OwnedFd, schedule: &Mutex<Schedule>, watched: i32) {
    loop {
        match rustix::io::read(timer, &mut [0; 8]) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        }
        let (mut schedule, helped) = lock_for_watcher(schedule, watched);
        if schedule.is_over {
            return;
        }
        if schedule.end(Instant::now()) || helped {
            schedule.apply(watched);
        }
        arm(timer, schedule.next());
    }
}

impl IdleClass {
    /// Makes the calling OS thread one. If it could not raise a lowered priority again (without `CAP_SYS_NICE`), the priority stays as it
    /// is.
    fn begin(limit: Duration) -> IdleClass {
        let schedule = Schedule { raised: false, idle_until: None, sparing_until: None, is_over: false };
        let mut idle_class = IdleClass { schedule: Arc::new(Mutex::new(schedule)), watcher: None };
        if !sys::set_default_class(0) || !sys::can_raise_priority() {
            return idle_class;
        }
        let Ok(timer) = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC) else { return idle_class };
        let (timer, watched) = (Arc::new(timer), sys::own_tid());
        let watch = {
            let (timer, schedule) = (timer.clone(), idle_class.schedule.clone());
            move || watch(&timer, &schedule, watched)
        };
        // The watching thread is made first. On a fully loaded machine a SCHED_IDLE thread might never come to make it.
        if let Ok(watcher) = thread::Builder::new().name("idle class".to_owned()).spawn(watch) {
            idle_class.watcher = Some((timer, watcher));
            idle_class.change(|schedule| schedule.idle_until = Some(Instant::now() + limit));
        }
        idle_class
    }

    /// Returns true if it gives way at all.
    fn is_enabled(&self) -> bool {
        self.watcher.is_some()
    }

    /// Changes the scheduling state. The timer is set only if the next end has changed.
    fn change(&self, change: impl FnOnce(&mut Schedule)) {
        let mut schedule = lock(&self.schedule);
        let before = schedule.next();
        change(&mut schedule);
        if let Some((timer, _)) = &self.watcher
            && schedule.next() != before
        {
            arm(timer, schedule.next());
        }
        schedule.apply(0);
        IDLE_UNTIL.set(schedule.next().filter(|_| schedule.class() == Class::Idle));
        drop(schedule);
        yield_if_idle_class();
    }
}

impl Drop for IdleClass {
    fn drop(&mut self) {
        if let Some((timer, watcher)) = self.watcher.take() {
            IDLE_UNTIL.set(None);
            sys::set_default_class(0);
            lock(&self.schedule).is_over = true;
            arm(&timer, Some(Instant::now()));
            // the watching thread waits for the timer, or has ended
            let _ = watcher.join();
        }
    }
}

/// Priority of the tracing OS thread, which alone holds this value.
#[derive(Debug)]
pub(crate) struct Priority {
    idle_class: IdleClass,
    raised: bool,
    /// End of the period in which the time as SCHED_IDLE starts again.
    renewed_until: Instant,
    /// True if stops follow one another closely: the priority is not lowered between them.
    pub(crate) busy: bool,
}

impl Priority {
    /// Takes control of the priority of the calling OS thread.
    pub(crate) fn begin() -> Priority {
        let renewed_until = Instant::now() + TRACING_RENEWAL_LIMIT;
        Priority { idle_class: IdleClass::begin(TRACING_LIMIT), raised: false, renewed_until, busy: false }
    }

    /// Raises the priority: from here on a thread may be stopped at any moment.
    pub(crate) fn raise(&mut self) {
        if !self.raised {
            self.raised = true;
            self.idle_class.change(|schedule| schedule.raised = true);
        }
    }

    /// Gives the processor to the other threads for 3 ms: from here on only idle threads are stopped.
    pub(crate) fn spare_others(&mut self) {
        if self.idle_class.is_enabled() {
            self.raised = true;
            self.idle_class.change(|schedule| {
                (schedule.raised, schedule.sparing_until) = (true, Some(Instant::now() + SPARING_LIMIT))
            });
        }
    }

    /// Ends [`Priority::spare_others`]: other threads will be stopped.
    pub(crate) fn end_sparing(&mut self) {
        self.idle_class.change(|schedule| schedule.sparing_until = None);
    }

    /// Returns true if there is a priority to lower.
    pub(crate) fn is_raised(&self) -> bool {
        self.raised && !self.busy
    }

    /// Lowers the priority: no thread is stopped or expected to stop.
    pub(crate) fn lower(&mut self) {
        if self.raised {
            self.raised = false;
            let now = Instant::now();
            let renewed = (self.idle_class.is_enabled() && now < self.renewed_until).then_some(now + TRACING_LIMIT);
            self.idle_class.change(|schedule| {
                (schedule.raised, schedule.sparing_until) = (false, None);
                schedule.idle_until = renewed.or(schedule.idle_until);
            });
        }
    }
}

/// Makes the calling OS thread SCHED_IDLE until this is dropped or 50 ms have passed.
///
/// For all preparation before a process is traced. If the thread could not raise a lowered priority again (without `CAP_SYS_NICE`), nothing
/// is changed.
#[derive(Debug)]
pub struct IdlePriority {
    _idle_class: IdleClass,
}

impl IdlePriority {
    /// Makes the calling OS thread give way, and first yields to the threads that wait for its processor already.
    pub fn begin() -> IdlePriority {
        // With the kernel's default slice they would wait longer. Not SCHED_IDLE yet: on a fully loaded machine no thread would end that.
        sys::set_default_class(0);
        sys::yield_processor();
        IdlePriority { _idle_class: IdleClass::begin(PREPARATION_LIMIT) }
    }

    /// Keeps it until the process has ended, so that the kernel's clean-up does not run before others either.
    pub fn keep_until_exit(self) {
        std::mem::forget(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tool_takes_short_turns_and_gives_way_where_it_may() {
        // Policies belong to a thread; this one belongs to the test.
        thread::spawn(|| {
            let idle_class = IdleClass::begin(TRACING_LIMIT * 1000);
            if !idle_class.is_enabled() {
                return; // nothing is changed if the priority could not be raised again
            }
            assert_eq!(sys::scheduling().0, libc::SCHED_IDLE);
            idle_class.change(|schedule| schedule.raised = true);
            assert_eq!(sys::scheduling().0, libc::SCHED_FIFO);
            drop(idle_class);
            let (policy, slice) = sys::scheduling();
            // A kernel without slices reports none.
            assert_eq!((policy, if slice == 0 { sys::SLICE_NS } else { slice }), (libc::SCHED_OTHER, sys::SLICE_NS));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn who_comes_last_with_the_lock_in_his_hands_is_helped() {
        let schedule = Mutex::new(Schedule { raised: true, idle_until: None, sparing_until: None, is_over: false });
        let (tell, told) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                if !sys::set_default_class(0) || !sys::can_raise_priority() {
                    return drop(tell);
                }
                let schedule = lock(&schedule);
                sys::set_idle_class(0);
                tell.send(sys::own_tid()).unwrap();
                while sys::scheduling().0 == libc::SCHED_IDLE {
                    std::hint::spin_loop();
                }
                drop(schedule);
            });
            if let Ok(watched) = told.recv() {
                assert!(lock_for_watcher(&schedule, watched).1);
            }
        });
        assert!(!lock_for_watcher(&schedule, 0).1);
    }

    #[test]
    fn who_spares_others_comes_first_when_that_has_lasted() {
        thread::spawn(|| {
            let mut priority = Priority::begin();
            if !priority.idle_class.is_enabled() {
                return;
            }
            // a time of giving way that has ended must have no effect
            priority.idle_class.change(|schedule| schedule.idle_until = None);
            let begun = Instant::now();
            priority.spare_others();
            assert!(sys::scheduling().0 == libc::SCHED_IDLE || begun.elapsed() >= SPARING_LIMIT);
            while sys::scheduling().0 == libc::SCHED_IDLE {
                assert!(begun.elapsed() < Duration::from_secs(60), "it gives way without end");
            }
            assert!(begun.elapsed() >= SPARING_LIMIT);
            assert_eq!(sys::scheduling().0, libc::SCHED_FIFO);
            priority.spare_others();
            priority.end_sparing();
            assert_eq!(sys::scheduling().0, libc::SCHED_FIFO);
            priority.spare_others();
            priority.renewed_until = begun;
            priority.lower();
            assert_eq!(sys::scheduling().0, libc::SCHED_OTHER);
            priority.raise();
            priority.renewed_until = Instant::now() + TRACING_LIMIT;
            let lowered = Instant::now();
            priority.lower();
            assert!(sys::scheduling().0 == libc::SCHED_IDLE || lowered.elapsed() >= TRACING_LIMIT);
            while sys::scheduling().0 == libc::SCHED_IDLE {
                assert!(lowered.elapsed() < Duration::from_secs(60), "it gives way without end");
            }
        })
        .join()
        .unwrap();
    }
}
