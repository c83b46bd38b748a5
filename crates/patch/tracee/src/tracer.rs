//! Records of the traced threads: running, stopped, reported. All ptrace calls happen on one OS thread.

use crate::error::lost;
use crate::priority::Priority;
use crate::registers::{ERESTART_RESTARTBLOCK, ERESTARTNOHAND, Registers};
use crate::restart;
use crate::sys::{self, Wait, WaitTimer};
use crate::{Error, Event, Pid, Process, ProcessOrigin, ThreadActivity, ThreadInfo, Tid, process};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::{Duration, Instant};
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;

/// Time limit for the stop of a thread; sleeps in the disk queue do not last longer.
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// First limit of the time for which other threads are stopped because of a thread in state D. No signal wakes it; mostly it waits for a
/// disk.
pub(crate) const UNINTERRUPTIBLE_LIMIT_MIN: Duration = Duration::from_millis(2);
/// Time of the first check of a wait: not just before that limit.
const FIRST_CHECK_DELAY: Duration = Duration::from_millis(3);
/// Number of reports served before the threads that were asked to stop are polled one by one. The kernel reports the youngest thread first:
/// a program that makes threads faster than they can be served would hide the others without end.
const REPORTS_OF_OTHERS_MAX: u32 = 32;
const RESTART_SYSCALL: u64 = libc::SYS_restart_syscall as u64;
/// Number of sleeps caused by one stop: the stop itself, and the next sleep in the restarted call.
const SWITCHES_OF_A_STOP: u64 = 2;

/// State of a stopped thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StopState {
    pub(crate) since_ns: u64,
    pub(crate) registers: Option<Registers>,
    pub(crate) group_stop: bool,
    /// True if it is in `PTRACE_EVENT_STOP`, the only stop from which remote calls may begin.
    pub(crate) trap: bool,
}

#[derive(Debug, Clone, Copy, Default)]
// Boxing the large variant would allocate while a thread is stopped.
#[allow(clippy::large_enum_variant)]
pub(crate) enum State {
    /// A parent reported the thread as new; its own first stop is still to come.
    #[default]
    Expected,
    Running,
    Stopped(StopState),
}

#[derive(Debug, Default)]
pub(crate) struct Thread {
    pub(crate) state: State,
    pub(crate) in_vfork: bool,
    /// True if it was asked to stop without a wait: its stop is reported as [`Event::Stopped`].
    pub(crate) stop_requested: bool,
    /// True if it is new and has not run yet; [`Event::NewThread`] is among the events, or was taken from there.
    announced: bool,
    /// True if it has been stopped before.
    pub(crate) stopped: bool,
    /// Number of sleeps before it was last stopped.
    switches_before: Option<u64>,
    /// The sleep to which it returns after it was resumed.
    returns_to: Option<ThreadActivity>,
    /// The call that it continues by `restart_syscall`, and its stack pointer and program counter.
    sleeps_in: Option<(u64, (u64, u64))>,
}

impl Thread {
    fn new(state: State) -> Thread {
        Thread { state, ..Thread::default() }
    }

    /// Records the call: a call interrupted twice is in `restart_syscall`, which does not show the call that it restarts.
    fn note_sleep(&mut self, registers: &Registers) {
        let place = (registers.rsp, registers.rip);
        self.sleeps_in = match (registers.syscall(), self.sleeps_in) {
            (Some(RESTART_SYSCALL), Some(known)) if known.1 == place => Some(known),
            (Some(RESTART_SYSCALL) | None, _) => None,
            (Some(nr), _) => Some((nr, place)),
        };
    }

    /// Returns the system call in which the thread was interrupted, as the program made it.
    pub(crate) fn interrupted_call(&self, registers: &Registers) -> Option<u64> {
        match registers.syscall()? {
            RESTART_SYSCALL => self.sleeps_in.map(|(nr, _)| nr),
            nr => Some(nr),
        }
    }
}

/// A process made by the target: the report of its parent and its own first stop must both have come.
#[derive(Debug, Default)]
struct Child {
    origin: Option<(Tid, ProcessOrigin)>,
    is_stopped: bool,
}

/// Effect of a report on a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopOutcome {
    /// The thread is stopped and held.
    Stopped,
    /// The report was served and the thread continues.
    Running,
    /// The thread has ended, or the process is another program now.
    Gone,
    /// The thread waits for the child of its vfork and cannot stop.
    InVfork,
    /// The thread sleeps in state D for longer than the limit that the caller of [`Tracer::await_stop`] gave.
    Uninterruptible,
}

/// Returns the error for a thread that did not stop in time.
pub(crate) fn unstoppable(tid: i32, state: char) -> Error {
    let why = match state {
        'D' => "it is in an uninterruptible sleep (state D)".to_owned(),
        state => format!("it is in state {state}"),
    };
    Error::Unstoppable { tid: Tid(tid), why }
}

#[derive(Debug)]
pub(crate) struct Tracer {
    pub(crate) process: Process,
    pub(crate) threads: HashMap<i32, Thread>,
    children: HashMap<i32, Child>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) timer: WaitTimer,
    pub(crate) priority: Priority,
    pub(crate) replaced: bool,
    /// Time for which other threads are stopped because of a thread in state D during a freeze; each failed attempt makes it longer.
    pub(crate) uninterruptible_limit: Duration,
    /// Threads that were idle at the last freeze; `None` before the first.
    pub(crate) idle: Option<Vec<i32>>,
    /// Reports served since the threads that were asked to stop were last polled.
    reports_of_others: u32,
}

impl Tracer {
    /// Seizes all threads of the process, on the calling OS thread.
    pub(crate) fn seize(process: Process) -> Result<Tracer, Error> {
        let timer =
            WaitTimer::new().map_err(|source| Error::Os { call: "timer_create", id: process.pid().0, source })?;
        let mut tracer = Tracer {
            process,
            threads: HashMap::new(),
            children: HashMap::new(),
            events: VecDeque::new(),
            timer,
            priority: Priority::begin(),
            replaced: false,
            uninterruptible_limit: UNINTERRUPTIBLE_LIMIT_MIN,
            idle: None,
            reports_of_others: 0,
        };
        // Threads made between two enumerations are found by the next one, or attached by the kernel because their parent was already
        // traced. A complete enumeration that finds nothing new proves that all are known.
        while tracer.seize_new()? {}
        // A process that has ended still shows its leader, until its parent has waited for it.
        match tracer.threads.is_empty() {
            true => Err(Error::Gone(tracer.process.pid())),
            false => Ok(tracer),
        }
    }

    /// Seizes threads that are not known yet; returns true if there may be more.
    pub(crate) fn seize_new(&mut self) -> Result<bool, Error> {
        let found = self.process.threads_but(|tid| self.threads.contains_key(&tid))?;
        let mut more = !found.all;
        for info in found.threads.into_iter().filter(ThreadInfo::runs_program) {
            if let Some(state) = self.seize_one(info.tid)? {
                self.threads.insert(info.tid.0, Thread::new(state));
            }
            // if one has ended, the list may be cut short
            more = true;
        }
        Ok(more)
    }

    /// Seizes unknown threads that are not attached to us; returns true if there were any. The other unknown threads report themselves.
    pub(crate) fn seize_unreported(&mut self) -> Result<bool, Error> {
        let found = self.process.threads_but(|tid| self.threads.contains_key(&tid))?;
        let mut any = false;
        for info in found.threads.into_iter().filter(ThreadInfo::runs_program) {
            if let Some(state @ State::Running) = self.seize_one(info.tid)? {
                self.threads.insert(info.tid.0, Thread::new(state));
                any = true;
            }
        }
        Ok(any)
    }

    /// Seizes an unknown thread: `None` if it has ended, `Expected` if the kernel has attached it to us already.
    fn seize_one(&self, tid: Tid) -> Result<Option<State>, Error> {
        match sys::seize(tid.0) {
            Ok(()) => Ok(Some(State::Running)),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            Err(error) => Ok(self.seize_refused(tid, error)?.then_some(State::Expected)),
        }
    }

    /// Finds the reason why a thread cannot be seized: `true` if the kernel has attached it to us already, `false` if it has ended.
    fn seize_refused(&self, tid: Tid, source: io::Error) -> Result<bool, Error> {
        let pid = self.process.pid();
        let status = match self.process.thread_status(tid) {
            Ok(status) => status,
            Err(error) if error.gone() => return Ok(false),
            Err(error) => return Err(error),
        };
        // the kernel names the tracing thread, not its process
        if status.tracer.0 == sys::own_tid() {
            return Ok(true);
        }
        if matches!(status.state, 'Z' | 'X') {
            return Ok(false);
        }
        if status.tracer.0 != 0 {
            let name = kernel_files::text(format!("/proc/{}/comm", status.tracer)).unwrap_or_default();
            return Err(Error::AlreadyTraced { pid, tracer: status.tracer, name: name.trim_end().to_owned() });
        }
        match source.raw_os_error() {
            Some(libc::EPERM) => Err(Error::Permission { pid, hint: process::permission_hint(&status) }),
            _ => Err(Error::Os { call: "PTRACE_SEIZE", id: tid.0, source }),
        }
    }

    pub(crate) fn any_stopped(&self) -> bool {
        self.threads.values().any(|thread| matches!(thread.state, State::Stopped(_)))
    }

    /// Returns the registers of a stopped thread, read once.
    pub(crate) fn registers(&mut self, tid: i32) -> Result<Registers, Error> {
        let stop_state = self.stop_state(tid)?;
        if let Some(registers) = stop_state.registers {
            return Ok(registers);
        }
        let registers = sys::registers(tid).map_err(|error| lost(tid, "PTRACE_GETREGS", error))?;
        stop_state.registers = Some(registers);
        Ok(registers)
    }

    pub(crate) fn stop_state(&mut self, tid: i32) -> Result<&mut StopState, Error> {
        match self.threads.get_mut(&tid).map(|thread| &mut thread.state) {
            Some(State::Stopped(stop_state)) => Ok(stop_state),
            _ => Err(Error::ThreadGone(Tid(tid))),
        }
    }

    /// Serves one report. Its findings about other threads go to the events.
    pub(crate) fn handle_report(&mut self, tid: i32, wait: Wait) -> Result<StopOutcome, Error> {
        match wait {
            Wait::Ended(code) => {
                self.ended(tid, code);
                Ok(StopOutcome::Gone)
            }
            Wait::Trap { group_stop } => Ok(self.trapped(tid, group_stop)),
            Wait::Signal(signal) => {
                self.forward(tid, signal)?;
                Ok(StopOutcome::Running)
            }
            Wait::Syscall => self.go(tid, 0),
            Wait::Event(libc::PTRACE_EVENT_EXEC) => {
                self.threads.clear();
                self.replaced = true;
                let now = sys::now_ns();
                let state = StopState { since_ns: now, registers: None, group_stop: false, trap: false };
                self.threads.insert(tid, Thread::new(State::Stopped(state)));
                self.events.push_back(Event::Exec);
                Ok(StopOutcome::Gone)
            }
            Wait::Event(event) => {
                self.note_event(tid, event)?;
                self.go(tid, 0)
            }
        }
    }

    fn ended(&mut self, tid: i32, code: i32) {
        let known = self.threads.remove(&tid).is_some();
        self.children.remove(&tid);
        if tid == self.process.pid().0 {
            self.threads.clear();
            self.events.push_back(Event::Exited(code));
        } else if known {
            self.events.push_back(Event::ThreadExited(Tid(tid)));
        }
    }

    fn trapped(&mut self, tid: i32, group_stop: bool) -> StopOutcome {
        let since_ns = sys::now_ns();
        // Repaired at once, not when it is resumed: a kill of the tool in between must not show either.
        let registers = sys::registers(tid).ok().map(|registers| repair_call(tid, registers));
        let stop_state = StopState { since_ns, registers, group_stop, trap: true };
        if !self.threads.contains_key(&tid) && !self.has_thread(tid) {
            let child = self.children.entry(tid).or_default();
            child.is_stopped = true;
            let origin = child.origin;
            self.announce(tid, origin);
            return StopOutcome::Stopped;
        }
        let thread = self.threads.entry(tid).or_insert_with(|| Thread::new(State::Expected));
        let is_new = matches!(thread.state, State::Expected);
        thread.state = State::Stopped(stop_state);
        if let Some(registers) = registers {
            thread.note_sleep(&registers);
        }
        if is_new {
            thread.announced = true;
            self.events.push_back(Event::NewThread(Tid(tid)));
        }
        StopOutcome::Stopped
    }

    fn has_thread(&self, tid: i32) -> bool {
        matches!(self.process.thread_info(Tid(tid)), Ok(Some(_)))
    }

    /// Records a new thread or process, or the end of a vfork.
    pub(crate) fn note_event(&mut self, tid: i32, event: i32) -> Result<(), Error> {
        if event != libc::PTRACE_EVENT_VFORK_DONE {
            return self.record_birth(tid, event);
        }
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.in_vfork = false;
        }
        self.events.push_back(Event::VforkDone(Tid(tid)));
        Ok(())
    }

    fn record_birth(&mut self, parent: i32, event: i32) -> Result<(), Error> {
        let new = match sys::event_message(parent) {
            Ok(message) => message as i32,
            Err(_) => return Ok(()),
        };
        if event == libc::PTRACE_EVENT_VFORK
            && let Some(thread) = self.threads.get_mut(&parent)
        {
            thread.in_vfork = true;
        }
        if self.threads.contains_key(&new) {
            return Ok(());
        }
        if let Ok(status) = self.process.thread_status(Tid(new)) {
            // An earlier tracer of the parent may have been gone when the thread was made.
            let attached = status.tracer.0 == sys::own_tid();
            let state = if attached { Some(State::Expected) } else { self.seize_one(Tid(new))? };
            self.threads.extend(state.map(|state| (new, Thread::new(state))));
            return Ok(());
        }
        let how = match self.process.shares_memory(Pid(new)) {
            Ok(true) if event == libc::PTRACE_EVENT_VFORK => ProcessOrigin::Vfork,
            Ok(true) => ProcessOrigin::CloneVm,
            // Without kcmp the flags of the call decide as far as they are known.
            Err(_) if event == libc::PTRACE_EVENT_VFORK => ProcessOrigin::Vfork,
            _ => ProcessOrigin::Fork,
        };
        let child = self.children.entry(new).or_default();
        child.origin = Some((Tid(parent), how));
        if child.is_stopped {
            let origin = child.origin;
            self.announce(new, origin);
        }
        Ok(())
    }

    fn announce(&mut self, pid: i32, origin: Option<(Tid, ProcessOrigin)>) {
        if let Some((parent, how)) = origin {
            self.events.push_back(Event::NewProcess { pid: Pid(pid), parent, how });
        }
    }

    /// Forwards a signal that is about to be delivered, with the same information. A call that it interrupted is repaired as after a stop:
    /// the kernel wakes traced threads even for signals that the program ignores.
    fn forward(&mut self, tid: i32, signal: i32) -> Result<(), Error> {
        if let Ok(registers) = sys::registers(tid) {
            repair_call(tid, registers);
        }
        self.go(tid, signal).map(drop)
    }

    /// Resumes a thread from a stop that was served.
    fn go(&mut self, tid: i32, signal: i32) -> Result<StopOutcome, Error> {
        // Killed meanwhile: the next wait reports it.
        is_there(sys::cont(tid, signal), "PTRACE_CONT", tid).map(|_| StopOutcome::Running)
    }

    /// Asks a running thread to stop. Returns `false` if it has ended, `true` also if it will stop by itself. With `records_sleep`, records the
    /// data for [`Tracer::idle_since_stop`], which takes as long as the stop itself.
    pub(crate) fn request_stop(&mut self, tid: i32, records_sleep: bool) -> Result<bool, Error> {
        match self.threads.get(&tid) {
            Some(Thread { state: State::Running, .. }) => {}
            Some(_) => {
                self.timer.arm(FIRST_CHECK_DELAY);
                return Ok(true);
            }
            None => return Ok(false),
        }
        self.priority.raise();
        let switches = if records_sleep { self.process.voluntary_switches(Tid(tid)).ok() } else { None };
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.switches_before = switches;
        }
        // Armed first, so that the wait directly follows the request.
        self.timer.arm(FIRST_CHECK_DELAY);
        let is_there = is_there(sys::interrupt(tid), "PTRACE_INTERRUPT", tid)?;
        if !is_there {
            self.threads.remove(&tid);
        }
        Ok(is_there)
    }

    /// Waits until a thread is stopped that was asked to stop, or is expected to; `limit_asleep` applies to one in state D.
    pub(crate) fn await_stop(
        &mut self,
        tid: i32,
        limit: Duration,
        limit_asleep: Option<Duration>,
    ) -> Result<StopOutcome, Error> {
        let begun = Instant::now();
        loop {
            match self.threads.get(&tid) {
                None => return Ok(StopOutcome::Gone),
                Some(Thread { state: State::Stopped(_), .. }) => return Ok(StopOutcome::Stopped),
                Some(_) => {}
            }
            match sys::wait(tid, true) {
                Ok(Some(report)) => match self.handle_report(tid, report)? {
                    StopOutcome::Running if self.threads.get(&tid).is_some_and(|thread| thread.in_vfork) => {
                        return Ok(StopOutcome::InVfork);
                    }
                    // Any stop cancels the request to stop (ptrace_stop clears JOBCTL_TRAP_STOP).
                    StopOutcome::Running => drop(sys::interrupt(tid)),
                    outcome => return Ok(outcome),
                },
                Ok(None) => {}
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {
                    self.threads.remove(&tid);
                    return Ok(StopOutcome::Gone);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    if self.waits_for_vfork(tid) {
                        return Ok(StopOutcome::InVfork);
                    }
                    match self.poll_state(tid)? {
                        None => return Ok(StopOutcome::Gone),
                        // the next wait reports it, unless this check did
                        Some('t') => {}
                        Some('D') if limit_asleep.is_some_and(|limit| begun.elapsed() >= limit) => {
                            return Ok(StopOutcome::Uninterruptible);
                        }
                        Some(state) if begun.elapsed() >= limit => return Err(unstoppable(tid, state)),
                        Some(_) => {}
                    }
                }
                Err(source) => return Err(Error::Os { call: "waitpid", id: tid, source }),
            }
        }
    }

    /// Returns the state of a thread that does not report, `None` if it has ended. The leader of a process whose other threads continue
    /// reports nothing when it ends.
    fn poll_state(&mut self, tid: i32) -> Result<Option<char>, Error> {
        let info = self.process.thread_info(Tid(tid))?;
        if let Some(info) = info.filter(|info| !matches!(info.state, 'Z' | 'X')) {
            return Ok(Some(info.state));
        }
        // It may have reported between the check and the wait.
        if let Ok(Some(report)) = sys::wait(tid, false) {
            let outcome = self.handle_report(tid, report)?;
            return Ok((outcome != StopOutcome::Gone).then_some('t'));
        }
        self.threads.remove(&tid);
        Ok(None)
    }

    /// Returns true if a thread waits for the child of a vfork: seen from its report, or, for one begun before the tool came, from the call
    /// in which it sleeps.
    pub(crate) fn waits_for_vfork(&mut self, tid: i32) -> bool {
        let Some(thread) = self.threads.get(&tid) else { return false };
        if matches!(thread.state, State::Stopped(_)) {
            return false;
        }
        if thread.in_vfork {
            return true;
        }
        // a thread that has been stopped since it is ours would have reported it
        !thread.stopped && matches!(self.process.thread_info(Tid(tid)), Ok(Some(info)) if self.sleeps_in_vfork(&info))
    }

    /// Returns true if the sleep of a thread that was just read is the wait for the child of a vfork. A thread that makes a thread or
    /// another child may sleep in the same call, for a lock of the kernel; the arguments of the call show the difference.
    pub(crate) fn sleeps_in_vfork(&self, info: &ThreadInfo) -> bool {
        if info.state != 'D' {
            return false;
        }
        let Ok(ThreadActivity { waits_in: Some((nr, args)), .. }) = self.process.activity(info.tid) else {
            return false;
        };
        let flags = match nr as i64 {
            libc::SYS_vfork => return true,
            libc::SYS_clone => args[0],
            // the first field of struct clone_args, clone(2)
            libc::SYS_clone3 => match self.process.memory().read_u64(Avma(args[0])) {
                Ok(flags) => flags,
                Err(_) => return true,
            },
            _ => return false,
        };
        flags & libc::CLONE_VFORK as u64 != 0
    }

    /// Resumes a stopped thread; returns for how long it was stopped, in nanoseconds.
    pub(crate) fn resume_thread(&mut self, tid: i32) -> Result<u64, Error> {
        let Some(thread) = self.threads.get_mut(&tid) else { return Ok(0) };
        let State::Stopped(stop_state) = thread.state else { return Ok(0) };
        thread.state = State::Running;
        thread.stopped = true;
        // A running thread is not new any more: a caller that met the event later would take it for a thread without frames.
        if std::mem::take(&mut thread.announced) {
            self.events.retain(|event| *event != Event::NewThread(Tid(tid)));
        }
        let result = if stop_state.group_stop { sys::listen(tid) } else { sys::cont(tid, 0) };
        let stopped_ns = sys::now_ns() - stop_state.since_ns;
        thread.returns_to = match (stop_state.registers, thread.switches_before.take()) {
            (Some(registers), Some(before)) if registers.restarts() => Some(sleep_after(&registers, before)),
            _ => None,
        };
        // Killed while it was stopped: the next wait reports it.
        is_there(result, "PTRACE_CONT", tid).map(|_| stopped_ns)
    }

    /// Returns true if the thread still sleeps the sleep into which it was resumed.
    pub(crate) fn idle_since_stop(&self, tid: i32) -> Result<bool, Error> {
        let Some(returns_to) = self.threads.get(&tid).and_then(|thread| thread.returns_to) else { return Ok(false) };
        let now = self.process.activity(Tid(tid))?;
        Ok(!now.ran_since(&returns_to, SWITCHES_OF_A_STOP))
    }

    /// Lowers the priority if no thread is stopped: the processor belongs to the target again. Callers call it after they resume threads.
    pub(crate) fn lower_priority(&mut self) {
        if !self.priority.is_raised() {
            return;
        }
        let is_held = |thread: &Thread| thread.stop_requested || !matches!(thread.state, State::Running);
        if !self.threads.values().any(is_held) && !self.children.values().any(|child| child.is_stopped) {
            self.priority.lower();
        }
    }

    /// Ends the tracing of a process that the target made.
    pub(crate) fn release(&mut self, pid: Pid) -> Result<(), Error> {
        if self.children.remove(&pid.0).is_none() {
            return Err(Error::Gone(pid));
        }
        is_there(sys::detach(pid.0), "PTRACE_DETACH", pid.0).map(drop)
    }

    /// Serves one report, of any thread: `None` if there was none (`block`: if the timer interrupted). A thread that is stopped without a
    /// request is resumed.
    pub(crate) fn serve_one(&mut self, block: bool) -> Result<Option<()>, Error> {
        if self.reports_of_others >= REPORTS_OF_OTHERS_MAX {
            self.reports_of_others = 0;
            let stop_requested =
                self.threads.iter().filter(|(_, thread)| thread.stop_requested).map(|(&tid, _)| tid).collect();
            if self.serve_each(stop_requested)? {
                return Ok(Some(()));
            }
        }
        if block {
            // for each report a thread is stopped
            self.priority.raise();
        }
        let tid = match sys::peek(block) {
            Ok(Some(tid)) => tid,
            Ok(None) => return Ok(None),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => return Ok(None),
                Some(libc::ECHILD) => {
                    self.no_thread_left();
                    return Ok(None);
                }
                _ => return Err(Error::Os { call: "waitid", id: self.process.pid().0, source: error }),
            },
        };
        if !self.is_ours(tid) {
            // A child of the tool that was not waited for hides the reports behind it.
            let all = self.threads.keys().chain(self.children.keys()).copied().collect();
            let served = self.serve_each(all)?;
            if !served {
                std::thread::sleep(Duration::from_millis(1));
            }
            return Ok(served.then_some(()));
        }
        self.reports_of_others += 1;
        match sys::wait(tid, false) {
            Ok(Some(report)) => self.serve(tid, report).map(Some),
            _ => Ok(Some(())),
        }
    }

    fn serve(&mut self, tid: i32, report: Wait) -> Result<(), Error> {
        let events = self.events.len();
        let outcome = self.handle_report(tid, report)?;
        let asked_for = self.events.len() > events || self.children.contains_key(&tid);
        let stop_requested = self.threads.get_mut(&tid).is_some_and(|thread| thread.stop_requested);
        match outcome {
            StopOutcome::Stopped if asked_for => {}
            StopOutcome::Stopped if stop_requested => {
                if let Some(thread) = self.threads.get_mut(&tid) {
                    thread.stop_requested = false;
                }
                self.events.push_back(Event::Stopped(Tid(tid)));
            }
            StopOutcome::Stopped => drop(self.resume_thread(tid)?),
            // Any stop cancels the request to stop (ptrace_stop clears JOBCTL_TRAP_STOP).
            StopOutcome::Running if stop_requested => drop(sys::interrupt(tid)),
            _ => {}
        }
        Ok(())
    }

    /// Serves the reports of these threads; returns true if there was any.
    fn serve_each(&mut self, tids: Vec<i32>) -> Result<bool, Error> {
        let mut served = false;
        for tid in tids {
            if let Ok(Some(report)) = sys::wait(tid, false) {
                self.serve(tid, report)?;
                served = true;
            }
        }
        Ok(served)
    }

    fn is_ours(&self, tid: i32) -> bool {
        self.threads.contains_key(&tid)
            || self.children.contains_key(&tid)
            || self.has_thread(tid)
            || kernel_files::text(format!("/proc/{tid}/status"))
                .is_ok_and(|text| text.contains(&format!("\nTracerPid:\t{}\n", sys::own_tid())))
    }

    fn no_thread_left(&mut self) {
        self.threads.clear();
        if !self.events.iter().any(|event| matches!(event, Event::Exited(_))) {
            self.events.push_back(Event::Exited(-1));
        }
    }
}

impl Drop for Tracer {
    /// Resumes all stopped threads with their calls repaired; the kernel does the rest when the OS thread ends.
    fn drop(&mut self) {
        self.timer.disarm();
        let is_stopped = |thread: &Thread| matches!(thread.state, State::Stopped(_));
        let tids: Vec<i32> = self.threads.iter().filter(|(_, t)| is_stopped(t)).map(|(&tid, _)| tid).collect();
        for tid in tids {
            let _ = self.resume_thread(tid);
        }
        while let Ok(Some(tid)) = sys::peek(false) {
            if !self.is_ours(tid) {
                break;
            }
            match sys::wait(tid, false) {
                Ok(Some(report)) => match self.handle_report(tid, report) {
                    Ok(StopOutcome::Stopped) => drop(self.resume_thread(tid)),
                    Ok(_) => {}
                    Err(_) => break,
                },
                _ => break,
            }
        }
        let children: Vec<i32> =
            self.children.iter().filter(|(_, child)| child.is_stopped).map(|(&pid, _)| pid).collect();
        for pid in children {
            let _ = self.release(Pid(pid));
        }
    }
}

/// Returns false if a request failed because the thread has ended.
pub(crate) fn is_there(result: io::Result<()>, call: &'static str, id: i32) -> Result<bool, Error> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        other => other.map(|()| true).map_err(|source| Error::Os { call, id, source }),
    }
}

/// Makes an interrupted call restart that would show the program an `EINTR`; returns the registers that the thread has then.
fn repair_call(tid: i32, registers: Registers) -> Registers {
    let interrupted = registers.rax as i64 == -i64::from(libc::EINTR);
    match registers.syscall() {
        Some(nr) if interrupted && restart::restartable(nr, &registers.syscall_args()) => {
            match sys::set_rax(tid, -ERESTARTNOHAND) {
                Ok(()) => Registers { rax: -ERESTARTNOHAND as u64, ..registers },
                Err(_) => registers,
            }
        }
        _ => registers,
    }
}

/// Returns the sleep to which a thread returns when its call is restarted.
fn sleep_after(registers: &Registers, switches_before: u64) -> ThreadActivity {
    let nr = match registers.rax as i64 {
        code if code == -ERESTART_RESTARTBLOCK => RESTART_SYSCALL,
        _ => registers.orig_rax,
    };
    ThreadActivity {
        waits_in: Some((nr, registers.syscall_args())),
        sp_pc: Some((registers.rsp, registers.rip)),
        voluntary_switches: switches_before,
    }
}
