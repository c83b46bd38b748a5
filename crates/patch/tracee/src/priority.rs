//! Who runs first: the tracer while a thread stands because of it, the target at every other time.
//!
//! The obvious way is one high priority throughout. Then the tool, while it links and reads, takes the processor from
//! the very server that it came to help, for milliseconds on a small machine: an ordinary thread that runs is not
//! preempted by one that wakes up before it had its slice. With an ordinary or low one throughout, a stopped thread
//! stands until the scheduler gets round to us. So it changes with what stands.

use crate::{early, sys};
use rustix::fd::OwnedFd;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// On a machine that has nothing to spare, whoever runs after everybody else never gets his turn: after this long it goes
/// on like everybody else.
const PREPARING: Duration = Duration::from_millis(50);
/// The same for a thread that traces: newborn threads and signals wait for it. It begins anew when nobody stands any more.
const TRACING: Duration = Duration::from_millis(5);
/// But so long after the beginning no longer, which is longer than most operations take: on a machine that has nothing to
/// spare they are to come to their end as well.
const TRACING_IN_ALL: Duration = Duration::from_millis(30);
/// The same while threads stand that nobody misses: then it goes on before everybody else.
const SPARING: Duration = Duration::from_millis(3);

thread_local! {
    /// Until when the calling OS thread comes last.
    static LAST_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Lets others run that wait for the processor of the calling OS thread, where it comes last. To be called between things
/// that take long: see [`sys::let_others_run`].
pub(crate) fn step_aside() {
    if LAST_UNTIL.get().is_some_and(|until| Instant::now() < until) {
        sys::let_others_run();
    }
}

/// Whose turn it is. An instant is when giving way ends; none where it has ended, or never was.
#[derive(Debug)]
struct Turn {
    /// Something stands.
    raised: bool,
    /// While nothing stands, the thread runs after everybody else.
    patient: Option<Instant>,
    /// While something stands, it does so all the same.
    sparing: Option<Instant>,
    /// Nobody is to be watched any more.
    over: bool,
}

/// When a thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    First,
    AmongOthers,
    Last,
}

impl Turn {
    fn place(&self) -> Place {
        match (self.raised, self.patient, self.sparing) {
            (true, _, None) => Place::First,
            (true, _, Some(_)) | (false, Some(_), _) => Place::Last,
            (false, None, _) => Place::AmongOthers,
        }
    }

    fn take(&self, tid: i32) {
        match self.place() {
            Place::First => sys::run_before_others(tid),
            Place::AmongOthers => drop(sys::run_like_others(tid)),
            Place::Last => sys::run_after_others(tid),
        }
    }

    /// Ends what is over by now; whether anything was.
    fn end(&mut self, now: Instant) -> bool {
        let due = |until: &mut Option<Instant>| until.take_if(|until| *until <= now).is_some();
        due(&mut self.patient) | due(&mut self.sparing)
    }

    /// When the next thing ends.
    fn next(&self) -> Option<Instant> {
        let sparing = self.sparing.filter(|_| self.raised);
        self.patient.into_iter().chain(sparing).min()
    }
}

/// An OS thread that runs after all others, for a limited time.
#[derive(Debug)]
struct Patient {
    turn: Arc<Mutex<Turn>>,
    watcher: Option<(Arc<OwnedFd>, JoinHandle<()>)>,
}

fn locked(turn: &Mutex<Turn>) -> MutexGuard<'_, Turn> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has the timer wake the watching thread then; with nothing to end, never.
fn arm(timer: &OwnedFd, next: Option<Instant>) {
    let in_time = |next: Instant| next.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
    let value = next.and_then(|next| Timespec::try_from(in_time(next)).ok()).unwrap_or_default();
    let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
    // the timer is ours, and the time is one
    let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &once);
}

/// The lock, and whether the watched thread had to be helped to let go of it: nobody else holds it, and who has just come last
/// may get no turn to do so.
fn locked_by_the_watcher(turn: &Mutex<Turn>, watched: i32) -> (MutexGuard<'_, Turn>, bool) {
    let mut helped = false;
    loop {
        match turn.try_lock() {
            Ok(turn) => return (turn, helped),
            Err(TryLockError::Poisoned(turn)) => return (turn.into_inner(), helped),
            Err(TryLockError::WouldBlock) => {
                // again, as it may be about to come last
                sys::run_like_others(watched);
                helped = true;
                thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// Ends turns that the watched thread cannot end by itself, as it may get no processor.
fn watch(timer: &OwnedFd, turn: &Mutex<Turn>, watched: i32) {
    loop {
        match rustix::io::read(timer, &mut [0; 8]) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        }
        let (mut turn, helped) = locked_by_the_watcher(turn, watched);
        if turn.over {
            return;
        }
        if turn.end(Instant::now()) || helped {
            turn.take(watched);
        }
        arm(timer, turn.next());
    }
}

impl Patient {
    /// Makes the calling OS thread one. Where a priority once given up could not be taken back (without
    /// `CAP_SYS_NICE`), it stays as it is.
    fn begin(patience: Duration) -> Patient {
        let turn = Turn { raised: false, patient: None, sparing: None, over: false };
        let mut patient = Patient { turn: Arc::new(Mutex::new(turn)), watcher: None };
        if !sys::run_like_others(0) || !sys::may_raise() {
            return patient;
        }
        let Ok(timer) = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC) else { return patient };
        let (timer, watched) = (Arc::new(timer), sys::own_tid());
        let watch = {
            let (timer, turn) = (timer.clone(), patient.turn.clone());
            move || watch(&timer, &turn, watched)
        };
        // The watching thread is made first. Nobody would see to it that a thread comes to make it, on a machine that has
        // nothing to spare.
        if let Ok(watcher) = thread::Builder::new().name("patience".to_owned()).spawn(watch) {
            patient.watcher = Some((timer, watcher));
            patient.change(|turn| turn.patient = Some(Instant::now() + patience));
        }
        patient
    }

    /// Whether it gives way at all.
    fn may_give_way(&self) -> bool {
        self.watcher.is_some()
    }

    /// Changes whose turn it is. The timer is set only where something ends at another time than before.
    fn change(&self, change: impl FnOnce(&mut Turn)) {
        let mut turn = locked(&self.turn);
        let before = turn.next();
        change(&mut turn);
        if let Some((timer, _)) = &self.watcher
            && turn.next() != before
        {
            arm(timer, turn.next());
        }
        turn.take(0);
        LAST_UNTIL.set(turn.next().filter(|_| turn.place() == Place::Last));
        drop(turn);
        step_aside();
    }
}

impl Drop for Patient {
    fn drop(&mut self) {
        if let Some((timer, watcher)) = self.watcher.take() {
            LAST_UNTIL.set(None);
            sys::run_like_others(0);
            locked(&self.turn).over = true;
            arm(&timer, Some(Instant::now()));
            // it waits for the timer, or has ended
            let _ = watcher.join();
        }
    }
}

/// The priority of the tracing OS thread, which is the only one to hold this.
#[derive(Debug)]
pub(crate) struct Priority {
    patient: Patient,
    raised: bool,
    /// Until then patience begins anew.
    renewed_until: Instant,
    /// Stops follow one another closely: in between it is not lowered.
    pub(crate) busy: bool,
}

impl Priority {
    /// Of the calling OS thread.
    pub(crate) fn begin() -> Priority {
        let renewed_until = Instant::now() + TRACING_IN_ALL;
        Priority { patient: Patient::begin(TRACING), raised: false, renewed_until, busy: false }
    }

    /// From here on a thread may stand, or come to stand at any moment.
    pub(crate) fn raise(&mut self) {
        if !self.raised {
            self.raised = true;
            self.patient.change(|turn| turn.raised = true);
        }
    }

    /// From here on only threads stand, or come to, that nobody misses: for 3 ms the processor is everybody else's.
    pub(crate) fn spare_others(&mut self) {
        if self.patient.may_give_way() {
            self.raised = true;
            self.patient.change(|turn| (turn.raised, turn.sparing) = (true, Some(Instant::now() + SPARING)));
        }
    }

    /// Takes [`Priority::spare_others`] back: others are to stand.
    pub(crate) fn spare_nobody(&mut self) {
        self.patient.change(|turn| turn.sparing = None);
    }

    /// Whether there is anything to lower.
    pub(crate) fn is_raised(&self) -> bool {
        self.raised && !self.busy
    }

    /// Nobody stands, and nobody is expected to.
    pub(crate) fn lower(&mut self) {
        if self.raised {
            self.raised = false;
            let now = Instant::now();
            let renewed = (self.patient.may_give_way() && now < self.renewed_until).then_some(now + TRACING);
            self.patient.change(|turn| {
                (turn.raised, turn.sparing) = (false, None);
                turn.patient = renewed.or(turn.patient);
            });
        }
    }
}

/// The calling OS thread runs only when nobody else wants the processor, until this is dropped or 50 ms have passed.
///
/// For everything that is to be prepared before a process is traced. Where a priority once given up could not be taken
/// back (without `CAP_SYS_NICE`), nothing is changed.
#[derive(Debug)]
pub struct GivingWay {
    _patient: Patient,
}

impl GivingWay {
    /// Begins it.
    pub fn begin() -> GivingWay {
        GivingWay { _patient: Patient::begin(PREPARING) }
    }

    /// Whether the calling process is a command that touches a running program, which has taken short turns on a processor
    /// since before `main`.
    pub fn is_called_for() -> bool {
        early::called_to_touch()
    }

    /// Keeps it until the process has ended: what the kernel tidies up then need not come before others either.
    pub fn to_the_end(self) {
        std::mem::forget(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tool_takes_short_turns_and_gives_way_where_it_may() {
        // Policies belong to a thread; this one is the test's own.
        thread::spawn(|| {
            let patient = Patient::begin(TRACING * 1000);
            if !patient.may_give_way() {
                return; // nothing is changed where it could not be taken back
            }
            assert_eq!(sys::scheduling().0, libc::SCHED_IDLE);
            patient.change(|turn| turn.raised = true);
            assert_eq!(sys::scheduling().0, libc::SCHED_FIFO);
            drop(patient);
            let (policy, slice) = sys::scheduling();
            // A kernel that does not know slices tells none.
            assert_eq!((policy, if slice == 0 { sys::SLICE_NS } else { slice }), (libc::SCHED_OTHER, sys::SLICE_NS));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn who_comes_last_with_the_lock_in_his_hands_is_helped() {
        let turn = Mutex::new(Turn { raised: true, patient: None, sparing: None, over: false });
        let (tell, told) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                if !sys::run_like_others(0) || !sys::may_raise() {
                    return drop(tell);
                }
                let turn = locked(&turn);
                sys::run_after_others(0);
                tell.send(sys::own_tid()).unwrap();
                while sys::scheduling().0 == libc::SCHED_IDLE {
                    std::hint::spin_loop();
                }
                drop(turn);
            });
            if let Ok(watched) = told.recv() {
                assert!(locked_by_the_watcher(&turn, watched).1);
            }
        });
        assert!(!locked_by_the_watcher(&turn, 0).1);
    }

    #[test]
    fn who_spares_others_comes_first_when_that_has_lasted() {
        thread::spawn(|| {
            let mut priority = Priority::begin();
            if !priority.patient.may_give_way() {
                return;
            }
            // a patience that has ended is not what gives way
            priority.patient.change(|turn| turn.patient = None);
            let begun = Instant::now();
            priority.spare_others();
            assert!(sys::scheduling().0 == libc::SCHED_IDLE || begun.elapsed() >= SPARING);
            while sys::scheduling().0 == libc::SCHED_IDLE {
                assert!(begun.elapsed() < Duration::from_secs(60), "it gives way without end");
            }
            assert!(begun.elapsed() >= SPARING);
            assert_eq!(sys::scheduling().0, libc::SCHED_FIFO);
            priority.spare_others();
            priority.spare_nobody();
            assert_eq!(sys::scheduling().0, libc::SCHED_FIFO);
            priority.spare_others();
            priority.renewed_until = begun;
            priority.lower();
            assert_eq!(sys::scheduling().0, libc::SCHED_OTHER);
            priority.raise();
            priority.renewed_until = Instant::now() + TRACING;
            let lowered = Instant::now();
            priority.lower();
            assert!(sys::scheduling().0 == libc::SCHED_IDLE || lowered.elapsed() >= TRACING);
            while sys::scheduling().0 == libc::SCHED_IDLE {
                assert!(lowered.elapsed() < Duration::from_secs(60), "it gives way without end");
            }
        })
        .join()
        .unwrap();
    }
}
