//! Calls made by a stopped thread for the tool; the thread survives if the tool is killed at any moment.
//!
//! The obvious way sets the registers, lets the thread run into a breakpoint and restores them. A tool that is killed meanwhile leaves a
//! thread that runs to an invalid state. Here the thread's stack first receives a frame like that of a signal handler. Only then do its
//! registers point to `ret`, with that frame's restorer as return address. From this moment on the thread, left alone, returns to
//! `rt_sigreturn` and restores itself. Each call only puts a `syscall` before the `ret`:
//!
//! ```text
//!            SETREGS: rip = ret       SETREGS: rip = syscall; ret                     SIGMASK, SETREGS: as before
//!  standing ------------------> ready ---------------------------> called --> ready --------------------------> standing
//!                                 \ left alone: ret -> restorer -> rt_sigreturn --> as before; call repeated
//! ```
//!
//! Signals are blocked after the registers point to the frame (which holds the true mask) and unblocked before they leave it, so a kill
//! meanwhile loses no mask. Functions return to `xchg %eax,%edi; ret` found in the target's text, so that the result survives the
//! restorer's `mov $15,%rax`.

use crate::error::lost;
use crate::frame::{self, Frame};
use crate::gadgets::Gadgets;
use crate::registers::{ERESTART_RESTARTBLOCK, ERESTARTNOHAND, ERESTARTNOINTR, ERESTARTSYS, Registers};
use crate::seccomp::Filters;
use crate::sys::{self, Wait};
use crate::tracer::{State, StopOutcome, Tracer};
use crate::{Error, Mapping, Tid, carrier};
use std::io;
use std::time::{Duration, Instant};
use stillpoint_patch_format::Avma;

/// Time limit for a system call that should take microseconds.
const SYSCALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of times that a system call is made again after job control interrupts it.
const ATTEMPTS_MAX: usize = 100;
/// Room for the extended state of any processor, in bytes; with AMX it is 11 KiB.
const EXTENDED_MAX: usize = 32 << 10;

/// A thread ready for remote calls. Dropping it restores the thread exactly to its state before.
///
/// At every moment the thread's registers lead, without the tool, to `rt_sigreturn` from a frame on its own stack. That frame restores the
/// thread and makes an interrupted system call again.
#[derive(Debug)]
pub struct Remote<'h> {
    tracer: &'h mut Tracer,
    tid: i32,
    gadgets: Gadgets,
    filters: Filters,
    original: Registers,
    mask: u64,
    frame: Frame,
    state: Vec<u8>,
    /// Present stop of the thread.
    phase: Phase,
    /// True if functions may have used the extended registers.
    state_used: bool,
    /// Signals that could not be blocked and were held back.
    deferred_signals: Vec<libc::siginfo_t>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The thread is in a trap, from which it can be restored.
    Trap,
    /// The thread is at the exit from a system call.
    Exit,
    /// The thread is left to itself; the frame will restore it.
    Abandoned,
    /// Restored.
    Restored,
}

impl<'h> Remote<'h> {
    pub(crate) fn begin(tracer: &'h mut Tracer, tid: i32) -> Result<Remote<'h>, Error> {
        let mappings = tracer.process.mappings()?;
        Remote::begin_among(tracer, tid, &mappings)
    }

    /// Does the same in a process with these mappings.
    pub(crate) fn begin_among(tracer: &'h mut Tracer, tid: i32, mappings: &[Mapping]) -> Result<Remote<'h>, Error> {
        if let Some(why) = carrier::fault_among(tracer, tid, mappings)? {
            return Err(Error::BadCarrier { tid: Tid(tid), why });
        }
        let gadgets = tracer.process.find_gadgets()?;
        let filters = Filters::of(&tracer.process, Tid(tid))?;
        let original = tracer.registers(tid)?;
        gadgets.check_return(&filters, Tid(tid), original.syscall_args())?;
        let mask = sys::signal_mask(tid).map_err(|error| lost(tid, "PTRACE_GETSIGMASK", error))?;
        let mut state = vec![0; EXTENDED_MAX];
        let len = sys::extended_state(tid, &mut state).map_err(|error| lost(tid, "PTRACE_GETREGSET", error))?;
        state.truncate(len);
        let full_state = state.clone();
        state.truncate(frame::extended_len(&state, sys::state_component));

        let call = tracer.threads.get(&tid).and_then(|thread| thread.interrupted_call(&original));
        let frame = frame::build(&restarted_call(&original, call), mask, &state, gadgets.restorer);
        tracer.process.memory().write(Avma(frame.base), &frame.bytes)?;
        let remote = Remote {
            tracer,
            tid,
            gadgets,
            filters,
            original,
            mask,
            frame,
            state: full_state,
            phase: Phase::Trap,
            state_used: false,
            deferred_signals: Vec::new(),
        };
        remote.point_to(&remote.restoring_registers())?;
        sys::set_signal_mask(tid, !synchronous_signals()).map_err(|error| lost(tid, "PTRACE_SETSIGMASK", error))?;
        Ok(remote)
    }

    /// Makes a system call; seccomp filters are evaluated for exactly this call first.
    ///
    /// # Errors
    /// [`Error::RemoteSyscall`] for an errno, [`Error::Seccomp`], or the thread cannot be used any more.
    pub fn syscall(&mut self, nr: u64, args: [u64; 6]) -> Result<u64, Error> {
        self.check_ready()?;
        self.gadgets.check(&self.filters, Tid(self.tid), nr, args)?;
        let [rdi, rsi, rdx, r10, r8, r9] = args;
        let rip = self.gadgets.syscall_ret;
        let call = Registers { rip, rax: nr, rdi, rsi, rdx, r10, r8, r9, ..self.restoring_registers() };
        let deadline = Instant::now() + SYSCALL_TIMEOUT;
        for _ in 0..ATTEMPTS_MAX {
            self.point_to(&call)?;
            // Entry, then exit.
            self.run_to_syscall(deadline, SYSCALL_TIMEOUT)?;
            self.run_to_syscall(deadline, SYSCALL_TIMEOUT)?;
            self.phase = Phase::Exit;
            let result = self.current()?.rax as i64;
            match -result {
                ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK => {}
                errno @ 1..4096 => {
                    let source = io::Error::from_raw_os_error(errno as i32);
                    return Err(Error::RemoteSyscall { tid: Tid(self.tid), nr, source });
                }
                _ => return Ok(result as u64),
            }
        }
        let source = io::Error::from_raw_os_error(libc::EINTR);
        Err(Error::RemoteSyscall { tid: Tid(self.tid), nr, source })
    }

    /// Calls `int f(void)` like a signal handler: at any point of the program, so it must save `errno` and take no lock that the thread may
    /// hold. The thread's filters apply to the function's system calls, which are not checked in advance.
    ///
    /// # Errors
    /// [`Error::NoGadget`], [`Error::Seccomp`] before the call; [`Error::RemoteTimeout`], [`Error::RemoteFault`] or [`Error::ThreadGone`]
    /// after it.
    pub fn function(&mut self, function: Avma, limit: Duration) -> Result<i32, Error> {
        self.check_ready()?;
        let missing = Error::NoGadget { pid: self.tracer.process.pid(), what: "xchg %eax,%edi; ret" };
        let exchange_ret = self.gadgets.exchange_ret.ok_or(missing)?;
        self.gadgets.check_return(&self.filters, Tid(self.tid), self.original.syscall_args())?;
        // As after a `call`: the return address is at a multiple of 16, less 8.
        let sp = self.frame.base - 8;
        self.tracer.process.memory().write(Avma(sp), &exchange_ret.to_le_bytes())?;
        self.state_used = true;
        self.point_to(&Registers { rip: function.0, rsp: sp, rax: 0, ..self.restoring_registers() })?;

        let deadline = Instant::now() + limit;
        let returned = loop {
            self.run_to_syscall(deadline, limit)?;
            let now = self.current()?;
            let restoring = now.rip == self.gadgets.restorer_end();
            if restoring && now.rsp == self.frame.base + 8 && now.orig_rax as i64 == libc::SYS_rt_sigreturn {
                break now.rdi as i32;
            }
        };
        // The thread is about to restore itself, which would clear the kernel's restart state. The call is skipped, and the thread is
        // stopped before its `ret` again, as after any system call.
        self.point_to(&self.restoring_registers())?;
        self.run_to_syscall(deadline.max(Instant::now() + SYSCALL_TIMEOUT), limit)?;
        self.phase = Phase::Exit;
        Ok(returned)
    }

    /// Makes the thread execute the code at `code` before anything else when it continues, by itself or after the tool's death. The code
    /// may use any register but the stack pointer, and returns; then the frame restores the thread.
    ///
    /// # Errors
    /// The thread has ended.
    pub(crate) fn divert(mut self, code: Avma) -> Result<Diversion, Error> {
        self.check_ready()?;
        self.point_to(&Registers { rip: code.0, ..self.restoring_registers() })?;
        self.phase = Phase::Abandoned;
        Ok(Diversion { tid: self.tid, original: self.original, mask: self.mask })
    }

    /// Restores the thread as `drop` does, and returns the error.
    ///
    /// # Errors
    /// The thread has ended, or the kernel denies a part of its state.
    pub fn finish(mut self) -> Result<(), Error> {
        self.restore()
    }

    fn restore(&mut self) -> Result<(), Error> {
        match self.phase {
            Phase::Restored | Phase::Abandoned => return Ok(()),
            Phase::Trap => {}
            Phase::Exit => {
                // Only a thread that passes the kernel's signal code restarts its system call. So a trap is requested, which the thread
                // meets before it reaches the program.
                self.point_to(&self.restoring_registers())?;
                self.trap()?;
            }
        }
        let tid = self.tid;
        if self.state_used {
            sys::set_extended_state(tid, &mut self.state).map_err(|error| lost(tid, "PTRACE_SETREGSET", error))?;
        }
        sys::set_signal_mask(tid, self.mask).map_err(|error| lost(tid, "PTRACE_SETSIGMASK", error))?;
        self.point_to(&self.original)?;
        self.phase = Phase::Restored;
        for info in self.deferred_signals.drain(..) {
            let _ = sys::queue_signal(self.tracer.process.pid().0, tid, &info);
        }
        if let Ok(stop_state) = self.tracer.stop_state(tid) {
            stop_state.registers = Some(self.original);
        }
        Ok(())
    }

    /// Returns registers from which the thread restores itself.
    fn restoring_registers(&self) -> Registers {
        let no_call = u64::MAX;
        // Direction and trap flags as a function expects them.
        let eflags = self.original.eflags & !0x500;
        Registers {
            rip: self.gadgets.syscall_ret + 2,
            rsp: self.frame.base,
            orig_rax: no_call,
            eflags,
            ..self.original
        }
    }

    fn check_ready(&self) -> Result<(), Error> {
        match self.phase {
            Phase::Trap | Phase::Exit => Ok(()),
            Phase::Abandoned | Phase::Restored => Err(Error::ThreadGone(Tid(self.tid))),
        }
    }

    fn point_to(&self, registers: &Registers) -> Result<(), Error> {
        sys::set_registers(self.tid, registers).map_err(|error| lost(self.tid, "PTRACE_SETREGS", error))
    }

    fn current(&self) -> Result<Registers, Error> {
        sys::registers(self.tid).map_err(|error| lost(self.tid, "PTRACE_GETREGS", error))
    }

    /// Lets the thread run to the next entry to or exit from a system call.
    fn run_to_syscall(&mut self, deadline: Instant, limit: Duration) -> Result<(), Error> {
        let mut signal = 0;
        loop {
            self.resume(sys::cont_to_syscall, signal)?;
            match self.next_report(deadline, limit)? {
                Wait::Syscall => return Ok(()),
                other => signal = self.serve(other)?,
            }
        }
    }

    /// Brings the thread into a trap without executing instructions of the program.
    fn trap(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + SYSCALL_TIMEOUT;
        let mut signal = 0;
        loop {
            // Each time, because any other stop cancels the request.
            sys::interrupt(self.tid).map_err(|error| lost(self.tid, "PTRACE_INTERRUPT", error))?;
            self.resume(sys::cont, signal)?;
            match self.next_report(deadline, SYSCALL_TIMEOUT)? {
                Wait::Trap { group_stop } => {
                    self.note_group_stop(group_stop);
                    self.phase = Phase::Trap;
                    return Ok(());
                }
                other => signal = self.serve(other)?,
            }
        }
    }

    fn resume(&self, how: fn(i32, i32) -> io::Result<()>, signal: i32) -> Result<(), Error> {
        how(self.tid, signal).map_err(|error| lost(self.tid, "PTRACE_SYSCALL", error))
    }

    /// Serves an unexpected report; returns the signal to continue with.
    fn serve(&mut self, report: Wait) -> Result<i32, Error> {
        match report {
            Wait::Signal(libc::SIGSTOP) => Ok(libc::SIGSTOP),
            Wait::Signal(signal) => self.serve_signal(signal),
            // Job control has stopped the process. This thread continues until it is restored, and then stays stopped.
            Wait::Trap { group_stop } => {
                self.note_group_stop(group_stop);
                Ok(0)
            }
            Wait::Event(event) if event != libc::PTRACE_EVENT_EXEC => {
                self.tracer.note_event(self.tid, event)?;
                Ok(0)
            }
            Wait::Syscall => Ok(0),
            ended => {
                self.phase = Phase::Abandoned;
                match self.tracer.handle_report(self.tid, ended)? {
                    StopOutcome::Gone if self.tracer.replaced => Err(Error::Exec(self.tracer.process.pid())),
                    _ => Err(Error::ThreadGone(Tid(self.tid))),
                }
            }
        }
    }

    /// Serves a signal that cannot be blocked because an instruction may raise it. A signal from elsewhere is held back; one that the
    /// called function raised ends the call.
    fn serve_signal(&mut self, signal: i32) -> Result<i32, Error> {
        let info = sys::signal_info(self.tid).map_err(|error| lost(self.tid, "PTRACE_GETSIGINFO", error))?;
        if info.si_code <= 0 {
            self.deferred_signals.push(info);
            return Ok(0);
        }
        let pc = self.current()?.pc();
        self.point_to(&self.restoring_registers())?;
        self.trap()?;
        Err(Error::RemoteFault { tid: Tid(self.tid), signal, pc })
    }

    fn note_group_stop(&mut self, group_stop: bool) {
        if let Ok(stop_state) = self.tracer.stop_state(self.tid) {
            stop_state.group_stop = group_stop;
        }
    }

    fn next_report(&mut self, deadline: Instant, limit: Duration) -> Result<Wait, Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.tracer.timer.arm(left.min(Duration::from_millis(20)));
        loop {
            match sys::wait(self.tid, true) {
                Ok(Some(report)) => return Ok(report),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    if Instant::now() >= deadline {
                        return Err(self.abandon(limit));
                    }
                }
                Err(error) => {
                    self.phase = Phase::Abandoned;
                    self.tracer.threads.remove(&self.tid);
                    return Err(lost(
                        self.tid,
                        "waitpid",
                        match error.raw_os_error() {
                            Some(libc::ECHILD) => io::Error::from_raw_os_error(libc::ESRCH),
                            _ => error,
                        },
                    ));
                }
            }
        }
    }

    /// Leaves the thread to itself. It runs now. It was resumed to the next system call, so the next wait of the tracer serves that report.
    fn abandon(&mut self, limit: Duration) -> Error {
        self.phase = Phase::Abandoned;
        if let Some(thread) = self.tracer.threads.get_mut(&self.tid) {
            thread.state = State::Running;
        }
        Error::RemoteTimeout { tid: Tid(self.tid), limit_ms: limit.as_millis() as u64 }
    }
}

impl Drop for Remote<'_> {
    fn drop(&mut self) {
        let _ = self.restore();
    }
}

/// A stopped thread that executes other code before its own when it continues.
#[derive(Debug)]
pub(crate) struct Diversion {
    tid: i32,
    original: Registers,
    mask: u64,
}

impl Diversion {
    /// Restores the thread, which is still stopped: it continues with its own code.
    pub(crate) fn cancel(&self) -> Result<(), Error> {
        let tid = self.tid;
        sys::set_signal_mask(tid, self.mask).map_err(|error| lost(tid, "PTRACE_SETSIGMASK", error))?;
        sys::set_registers(tid, &self.original).map_err(|error| lost(tid, "PTRACE_SETREGS", error))
    }
}

/// Returns the registers with which an interrupted system call is made again if nothing happens in between. The kernel does the same when
/// it restarts a call, but `rt_sigreturn` does not. `call` is the call that the program made.
fn restarted_call(registers: &Registers, call: Option<u64>) -> Registers {
    let no_call = Registers { orig_rax: u64::MAX, ..*registers };
    match call {
        Some(nr) if registers.restarts() => Registers { rip: registers.rip - 2, rax: nr, ..no_call },
        // The call that restart_syscall restarts is unknown: it was interrupted before the tool came.
        None if registers.restarts() => Registers { rax: -i64::from(libc::EINTR) as u64, ..no_call },
        _ => no_call,
    }
}

/// Returns the signals that instructions raise. If they were blocked, the kernel would reset their handlers and kill.
fn synchronous_signals() -> u64 {
    let signals = [libc::SIGILL, libc::SIGTRAP, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV, libc::SIGSYS];
    signals.iter().fold(0, |mask, signal| mask | 1 << (signal - 1))
}
