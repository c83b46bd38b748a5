//! A traced process: seize, stop, resume, events.

use crate::freeze::{FrozenProcess, PartialFreeze};
use crate::status::AverageUsage;
use crate::tracer::{STOP_TIMEOUT, State, StopOutcome, Tracer};
use crate::{Error, Event, Pid, Process, Stopped, Tid, sys};
use std::collections::BTreeSet;
use std::panic;
use std::thread;
use std::time::{Duration, Instant};
use stillpoint_host::kernel_files;

/// Largest number of reports without an event that one call serves: a storm of signals never ends.
const REPORTS_PER_CALL_MAX: usize = 1024;
/// Number of threads that can be stopped within a few milliseconds with the processor given to the target in between.
const FEW_THREADS_MAX: usize = 32;

/// Result of [`Session::stop`].
#[derive(Debug)]
pub enum Stop<'s> {
    /// The thread is stopped until the value is dropped.
    Stopped(Stopped<'s>),
    /// The thread has ended.
    Gone,
    /// The thread waits for the child of its vfork, which uses this memory: it cannot be stopped, and does not run until
    /// [`Event::VforkDone`].
    InVfork,
}

/// Result of a request to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopRequest {
    /// [`Event::Stopped`] or [`Event::ThreadExited`] will follow.
    Pending,
    /// The thread is stopped already.
    AlreadyStopped,
    /// The thread is new and has not run yet: [`Event::NewThread`] will follow.
    New,
    /// The thread has ended.
    Gone,
    /// The thread waits for the child of its vfork and cannot be stopped before [`Event::VforkDone`].
    InVfork,
}

/// All threads of a process, traced but running. Only [`attach`] makes this value.
#[derive(Debug)]
pub struct Session<'p> {
    process: &'p Process,
    pub(crate) tracer: Tracer,
}

/// Runs `work` with all threads of the process traced (`PTRACE_SEIZE`, none stopped), on an OS thread made for it, and releases all of them
/// afterwards, even if `work` fails. If the tool is killed, the kernel does the same.
///
/// The obvious way to end tracing is to detach each thread. For that every thread must be stopped once more, and every sleeper interrupted.
/// When the tracing OS thread ends, the kernel releases all threads without stopping any.
///
/// `work` must not block for long without [`Session::pump`]: signals and new threads wait for it meanwhile.
///
/// # Errors
/// The process has ended, is traced already, or may not be traced; or no OS thread can be started. Then `work` was not called.
pub fn attach<R: Send>(process: &Process, work: impl FnOnce(&mut Session<'_>) -> R + Send) -> Result<R, Error> {
    let tracing = || {
        let tracer = Tracer::seize(process.clone())?;
        let mut session = Session { process, tracer };
        Ok((work(&mut session), sys::own_tid()))
    };
    let outcome = thread::scope(|scope| {
        let thread = thread::Builder::new().name("tracer".to_owned()).spawn_scoped(scope, tracing);
        let thread = thread.map_err(|source| Error::Os { call: "starting a thread", id: process.pid().0, source })?;
        thread.join().unwrap_or_else(|cause| panic::resume_unwind(cause))
    });
    let (result, tid) = outcome?;
    // `join` returns while the OS thread is still ending; the tracees are free only after that.
    let task = format!("/proc/self/task/{tid}");
    while kernel_files::metadata(&task).is_ok() {
        thread::sleep(Duration::from_micros(50));
    }
    Ok(result)
}

impl<'p> Session<'p> {
    /// Returns the process.
    pub fn process(&self) -> &'p Process {
        self.process
    }

    /// Returns the known threads in ascending order, without kernel workers.
    pub fn threads(&self) -> Vec<Tid> {
        let mut threads: Vec<Tid> = self.tracer.threads.keys().map(|&tid| Tid(tid)).collect();
        threads.sort_unstable();
        threads
    }

    /// Returns true if a thread is among [`Session::threads`].
    pub fn knows(&self, tid: Tid) -> bool {
        self.tracer.threads.contains_key(&tid.0)
    }

    /// Seizes threads that are not reported; returns true if there were any. A thread that is seized while it makes a thread makes one that
    /// is not traced. After each of [`Session::threads`] has been stopped once, that cannot happen any more.
    ///
    /// # Errors
    /// A thread cannot be seized or read.
    pub fn seize_unreported(&mut self) -> Result<bool, Error> {
        self.tracer.seize_unreported()
    }

    /// Asks a thread to stop, without waiting for it: on a busy machine a thread needs its turn on a processor before it can stop, and many
    /// threads can wait for theirs together. [`Session::pump`] reports when it is stopped. [`Session::idle_since_stop`] does not know about
    /// such a stop.
    ///
    /// # Errors
    /// The kernel refuses the request.
    pub fn request_stop(&mut self, tid: Tid) -> Result<StopRequest, Error> {
        self.request(tid, false)
    }

    /// Asks like [`Session::request_stop`], for a thread that may have to be asked once more: [`Session::idle_since_stop`] will know about
    /// the stop.
    ///
    /// # Errors
    /// As [`Session::request_stop`].
    pub fn request_stop_again(&mut self, tid: Tid) -> Result<StopRequest, Error> {
        self.request(tid, true)
    }

    fn request(&mut self, tid: Tid, records_sleep: bool) -> Result<StopRequest, Error> {
        if self.tracer.waits_for_vfork(tid.0) {
            return Ok(StopRequest::InVfork);
        }
        if !self.tracer.request_stop(tid.0, records_sleep)? {
            return Ok(StopRequest::Gone);
        }
        match self.tracer.threads.get_mut(&tid.0) {
            None => Ok(StopRequest::Gone),
            Some(thread) if matches!(thread.state, State::Stopped(_)) => Ok(StopRequest::AlreadyStopped),
            Some(thread) if matches!(thread.state, State::Expected) => Ok(StopRequest::New),
            Some(thread) => {
                thread.stop_requested = true;
                Ok(StopRequest::Pending)
            }
        }
    }

    /// Returns true if a thread has not executed an instruction yet: it is held, or its first stop is still to come.
    pub fn is_new(&self, tid: Tid) -> bool {
        let announced = || self.tracer.events.iter().any(|event| *event == Event::NewThread(tid));
        self.tracer.threads.get(&tid.0).is_some_and(|thread| matches!(thread.state, State::Expected)) || announced()
    }

    /// Withdraws all requests; threads that are stopped because of one continue.
    ///
    /// # Errors
    /// A thread cannot be resumed; the requests are withdrawn.
    pub fn withdraw_requests(&mut self) -> Result<(), Error> {
        self.tracer.threads.values_mut().for_each(|thread| thread.stop_requested = false);
        let stopped: Vec<i32> = self
            .tracer
            .events
            .iter()
            .filter_map(|e| if let Event::Stopped(t) = e { Some(t.0) } else { None })
            .collect();
        self.tracer.events.retain(|event| !matches!(event, Event::Stopped(_)));
        let result = stopped.into_iter().try_for_each(|tid| match self.tracer.resume_thread(tid) {
            Ok(_) | Err(Error::ThreadGone(_)) => Ok(()),
            Err(error) => Err(error),
        });
        self.tracer.lower_priority();
        result
    }

    /// Announces that all threads will be stopped one after another, or that this is over. With many of them the tracer keeps the processor
    /// in between: otherwise it would get the processor back only after every thread of a busy program has had its turn, a thousand times.
    pub fn expect_all_to_stop(&mut self, expected: bool) {
        self.tracer.priority.busy = expected && self.tracer.threads.len() > FEW_THREADS_MAX;
        match self.tracer.priority.busy {
            true => self.tracer.priority.raise(),
            false => self.tracer.lower_priority(),
        }
    }

    /// Returns threads that sleep and have used much less of the processors than the others: a pause of some milliseconds does no harm. The
    /// answer is as of the last freeze, or otherwise as of now.
    ///
    /// # Errors
    /// [`Error::Gone`], or a thread's `stat` cannot be understood.
    pub fn idle(&self) -> Result<BTreeSet<Tid>, Error> {
        if let Some(idle) = &self.tracer.idle {
            return Ok(idle.iter().map(|&tid| Tid(tid)).collect());
        }
        let mut threads = Vec::with_capacity(self.tracer.threads.len());
        for &tid in self.tracer.threads.keys() {
            threads.extend(self.process.thread_info(Tid(tid))?);
        }
        let average = AverageUsage::of(threads.iter().map(|thread| thread.cpu_ticks));
        let idle = threads.iter().filter(|thread| thread.state == 'S' && average.is_idle(thread.cpu_ticks));
        Ok(idle.map(|thread| thread.tid).collect())
    }

    /// Announces, among threads that [`Session::expect_all_to_stop`] covers, that for now only [`Session::idle`] threads will be stopped,
    /// or that this is over. For 3 ms the processor then belongs to all other threads.
    pub fn expect_idle_to_stop(&mut self, expected: bool) {
        match expected && self.tracer.priority.busy {
            true => self.tracer.priority.spare_others(),
            false => self.tracer.priority.end_sparing(),
        }
    }

    /// Stops one thread. One that is held already (new, or found stopped) is returned as it is.
    ///
    /// After [`Error::Unstoppable`] the thread continues; when it does stop, the next [`Session::pump`] resumes it.
    ///
    /// # Errors
    /// [`Error::Unstoppable`] after five seconds; [`Error::Exec`] if the process runs another program now.
    pub fn stop(&mut self, tid: Tid) -> Result<Stop<'_>, Error> {
        if self.tracer.waits_for_vfork(tid.0) {
            return Ok(Stop::InVfork);
        }
        if !self.tracer.request_stop(tid.0, true)? {
            return Ok(Stop::Gone);
        }
        let outcome = self.tracer.await_stop(tid.0, STOP_TIMEOUT, None);
        if let Some(thread) = self.tracer.threads.get_mut(&tid.0) {
            thread.stop_requested = false;
        }
        match outcome? {
            StopOutcome::Stopped => Ok(Stop::Stopped(Stopped::new(&mut self.tracer, tid.0))),
            StopOutcome::InVfork => Ok(Stop::InVfork),
            _ if self.tracer.replaced => Err(Error::Exec(self.process.pid())),
            _ => Ok(Stop::Gone),
        }
    }

    /// Resumes a held thread that has no [`Stopped`]. A thread that is not held is left alone.
    ///
    /// # Errors
    /// The kernel refuses to resume it.
    pub fn resume_thread(&mut self, tid: Tid) -> Result<(), Error> {
        let result = self.tracer.resume_thread(tid.0);
        self.tracer.lower_priority();
        result.map(drop)
    }

    /// Ends the tracing of a new process; it continues.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is not held, or the kernel refuses to detach it.
    pub fn release(&mut self, pid: Pid) -> Result<(), Error> {
        let result = self.tracer.release(pid);
        self.tracer.lower_priority();
        result
    }

    /// Returns true if a thread has executed nothing of the program since it was last resumed: another stop would show nothing new and
    /// restart its time-out. False for a thread that was never stopped, or not in a system call.
    ///
    /// # Errors
    /// [`Error::ThreadGone`], or its state cannot be understood.
    pub fn idle_since_stop(&mut self, tid: Tid) -> Result<bool, Error> {
        self.tracer.idle_since_stop(tid.0)
    }

    /// Serves the target (signals are forwarded unchanged, job control is kept) and returns the next event, or `None` when the deadline has
    /// passed. With a deadline in the past, returns only an event that is already there.
    ///
    /// # Errors
    /// The kernel refuses a wait, or to resume a thread.
    pub fn pump(&mut self, deadline: Instant) -> Result<Option<Event>, Error> {
        // An event is returned before more is served: mostly a thread is stopped for it.
        for _ in 0..REPORTS_PER_CALL_MAX {
            if !self.tracer.events.is_empty() || self.tracer.serve_one(false)?.is_none() {
                break;
            }
        }
        loop {
            if let Some(event) = self.tracer.events.pop_front() {
                self.tracer.timer.disarm();
                return Ok(Some(event));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.tracer.timer.disarm();
                self.tracer.lower_priority();
                return Ok(None);
            }
            self.tracer.timer.arm(left);
            self.tracer.serve_one(true)?;
        }
    }

    /// Stops all threads, sleeping ones first and running ones last; on failure all continue.
    ///
    /// A thread in state D cannot be woken: the others are stopped for it only some milliseconds. Then all continue, and it is tried again,
    /// for half a second.
    ///
    /// # Errors
    /// [`Error::Unstoppable`] with the thread that prevents it; [`Error::Exec`]; [`Error::Gone`].
    pub fn freeze(&mut self) -> Result<FrozenProcess<'_, 'p>, Error> {
        FrozenProcess::all(self)
    }

    /// Stops [`Session::idle`] threads, and the other threads on completion. Both are tried once.
    ///
    /// # Errors
    /// As [`Session::freeze`]; all threads continue.
    pub fn begin_freeze(&mut self) -> Result<PartialFreeze<'_, 'p>, Error> {
        PartialFreeze::begin(self)
    }

    /// Stops the thread that can best carry remote calls: one in a system call that restarts, with room on its own stack. Threads that were
    /// examined and cannot carry them are resumed.
    ///
    /// # Errors
    /// [`Error::NoCarrier`] with the reason of the last examined thread; [`Error::NoGadget`]; [`Error::Exec`].
    pub fn stop_carrier(&mut self) -> Result<Stopped<'_>, Error> {
        // The search through the C library's text takes long: before any thread is stopped, not while the carrier is.
        self.process.find_gadgets()?;
        let mut why = "it has no threads".to_owned();
        for tid in crate::carrier::by_fitness(&self.tracer) {
            if self.tracer.waits_for_vfork(tid) || !self.tracer.request_stop(tid, true)? {
                continue;
            }
            match self.tracer.await_stop(tid, STOP_TIMEOUT, None) {
                Ok(StopOutcome::Stopped) => {}
                Ok(_) => continue,
                Err(error @ Error::Unstoppable { .. }) => {
                    why = error.to_string();
                    continue;
                }
                Err(error) => return Err(error),
            }
            match crate::carrier::fault(&mut self.tracer, tid) {
                Ok(None) => return Ok(Stopped::new(&mut self.tracer, tid)),
                Ok(Some(fault)) => why = format!("thread {tid}: {fault}"),
                Err(error) => why = error.to_string(),
            }
            self.tracer.resume_thread(tid)?;
        }
        match self.tracer.replaced {
            true => Err(Error::Exec(self.process.pid())),
            false => Err(Error::NoCarrier { pid: self.process.pid(), why }),
        }
    }
}
