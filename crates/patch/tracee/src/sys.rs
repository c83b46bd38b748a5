//! System calls of this crate, one thin wrapper each. All `unsafe` of the crate is in this file and in `own.rs`, which has the calls on the
//! tool itself.

use crate::registers::Registers;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Once;
use std::time::Duration;

/// Requests and flags that `libc` does not have.
const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;
const NT_X86_XSTATE: usize = 0x202;
const KCMP_VM: i32 = 1;

/// Options of a seize. `TRACESYSGOOD` makes the death of the tracer harmless at a system-call stop: the kernel then drops the stop's code
/// as an invalid signal number. Without the option it would send the target a SIGTRAP. `EXITKILL` must never be among them.
const OPTIONS: usize = (libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEEXEC
    | libc::PTRACE_O_TRACEVFORKDONE) as usize;

/// Report of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Exit code, or 128 + signal.
    Ended(i32),
    /// A signal is about to be delivered.
    Signal(i32),
    /// Entry to or exit from a system call.
    Syscall,
    /// `PTRACE_EVENT_STOP`; `group_stop` is true if job control has stopped the process.
    Trap { group_stop: bool },
    /// Another `PTRACE_EVENT_*`.
    Event(i32),
}

impl Wait {
    fn of(status: i32) -> Wait {
        if libc::WIFEXITED(status) {
            return Wait::Ended(libc::WEXITSTATUS(status));
        }
        if libc::WIFSIGNALED(status) {
            return Wait::Ended(128 + libc::WTERMSIG(status));
        }
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            0 if signal == libc::SIGTRAP | 0x80 => Wait::Syscall,
            0 => Wait::Signal(signal),
            libc::PTRACE_EVENT_STOP => Wait::Trap { group_stop: signal != libc::SIGTRAP },
            event => Wait::Event(event),
        }
    }
}

/// # Safety
/// `data` must fit the request: an integer, or the address of an object that the request reads or writes.
unsafe fn ptrace(request: u32, tid: i32, addr: usize, data: usize) -> io::Result<i64> {
    // SAFETY: the raw call has no preconditions beyond those of this function. glibc's wrapper is avoided because it
    // treats some requests in its own way.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request as libc::c_long, tid as libc::c_long, addr, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub(crate) fn seize(tid: i32) -> io::Result<()> {
    // SAFETY: data is an integer.
    unsafe { ptrace(libc::PTRACE_SEIZE, tid, 0, OPTIONS) }.map(drop)
}

/// Seizes a thread of which only the exec is of interest.
pub(crate) fn seize_for_exec(tid: i32) -> io::Result<()> {
    let options = (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACEEXEC) as usize;
    // SAFETY: data is an integer.
    unsafe { ptrace(libc::PTRACE_SEIZE, tid, 0, options) }.map(drop)
}

pub(crate) fn interrupt(tid: i32) -> io::Result<()> {
    // SAFETY: data is unused.
    unsafe { ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0) }.map(drop)
}

pub(crate) fn cont(tid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: data is an integer.
    unsafe { ptrace(libc::PTRACE_CONT, tid, 0, signal as usize) }.map(drop)
}

pub(crate) fn cont_to_syscall(tid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: data is an integer.
    unsafe { ptrace(libc::PTRACE_SYSCALL, tid, 0, signal as usize) }.map(drop)
}

pub(crate) fn listen(tid: i32) -> io::Result<()> {
    // SAFETY: data is unused.
    unsafe { ptrace(libc::PTRACE_LISTEN, tid, 0, 0) }.map(drop)
}

pub(crate) fn detach(tid: i32) -> io::Result<()> {
    // SAFETY: data is an integer (no signal).
    unsafe { ptrace(libc::PTRACE_DETACH, tid, 0, 0) }.map(drop)
}

pub(crate) fn event_message(tid: i32) -> io::Result<u64> {
    let mut message = 0u64;
    // SAFETY: the request writes one unsigned long.
    unsafe { ptrace(libc::PTRACE_GETEVENTMSG, tid, 0, &raw mut message as usize) }?;
    Ok(message)
}

pub(crate) fn registers(tid: i32) -> io::Result<Registers> {
    let mut registers = Registers::default();
    // SAFETY: the request writes one user_regs_struct, whose layout `Registers` has.
    unsafe { ptrace(libc::PTRACE_GETREGS, tid, 0, &raw mut registers as usize) }?;
    Ok(registers)
}

pub(crate) fn set_registers(tid: i32, registers: &Registers) -> io::Result<()> {
    // SAFETY: the request reads one user_regs_struct, whose layout `Registers` has.
    unsafe { ptrace(libc::PTRACE_SETREGS, tid, 0, registers as *const Registers as usize) }.map(drop)
}

pub(crate) fn set_rax(tid: i32, value: i64) -> io::Result<()> {
    let offset = std::mem::offset_of!(Registers, rax);
    // SAFETY: data is an integer; `struct user` begins with the registers.
    unsafe { ptrace(libc::PTRACE_POKEUSER, tid, offset, value as usize) }.map(drop)
}

/// Fills `buf` with the extended state in the kernel's non-compacted format; returns the length used.
pub(crate) fn extended_state(tid: i32, buf: &mut [u8]) -> io::Result<usize> {
    let mut iov = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: the request writes at most `iov_len` bytes to `iov_base` and updates `iov_len`.
    unsafe { ptrace(libc::PTRACE_GETREGSET, tid, NT_X86_XSTATE, &raw mut iov as usize) }?;
    Ok(iov.iov_len)
}

/// Sets the extended state from an image that [`extended_state`] returned.
pub(crate) fn set_extended_state(tid: i32, state: &mut [u8]) -> io::Result<()> {
    let mut iov = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
    // SAFETY: the request reads at most `iov_len` bytes from `iov_base` and updates `iov_len`.
    unsafe { ptrace(libc::PTRACE_SETREGSET, tid, NT_X86_XSTATE, &raw mut iov as usize) }.map(drop)
}

pub(crate) fn signal_mask(tid: i32) -> io::Result<u64> {
    let mut mask = 0u64;
    // SAFETY: the request writes `addr` = 8 bytes.
    unsafe { ptrace(libc::PTRACE_GETSIGMASK, tid, 8, &raw mut mask as usize) }?;
    Ok(mask)
}

pub(crate) fn set_signal_mask(tid: i32, mask: u64) -> io::Result<()> {
    // SAFETY: the request reads `addr` = 8 bytes.
    unsafe { ptrace(libc::PTRACE_SETSIGMASK, tid, 8, &raw const mask as usize) }.map(drop)
}

/// Returns the information about the signal that is about to be delivered (`si_signo`, `si_code`, sender).
pub(crate) fn signal_info(tid: i32) -> io::Result<libc::siginfo_t> {
    // SAFETY: siginfo_t is plain data, for which all zeroes is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the request writes one siginfo_t.
    unsafe { ptrace(libc::PTRACE_GETSIGINFO, tid, 0, &raw mut info as usize) }?;
    Ok(info)
}

/// Queues a signal for one thread with the given information, as `sigqueue` does; only codes of user origin work.
pub(crate) fn queue_signal(pid: i32, tid: i32, info: &libc::siginfo_t) -> io::Result<()> {
    // SAFETY: the call reads one siginfo_t.
    let result =
        unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, info.si_signo, info as *const libc::siginfo_t) };
    if result == 0 {
        return Ok(());
    }
    // The kernel does not permit a forged code of kernel or tkill origin; the signal itself must still not be lost.
    // SAFETY: plain integers.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, info.si_signo) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the instructions of the `index`th seccomp filter of a thread, newest first, 8 bytes each; `None` after the last one.
pub(crate) fn seccomp_filter(tid: i32, index: usize) -> io::Result<Option<Vec<u8>>> {
    // SAFETY: without a buffer the request only returns the number of instructions.
    let count = match unsafe { ptrace(PTRACE_SECCOMP_GET_FILTER, tid, index, 0) } {
        Ok(count) => count as usize,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut buf = vec![0u8; count * 8];
    // SAFETY: the request writes 8 bytes for each of the `count` instructions; the filter cannot change.
    let written = unsafe { ptrace(PTRACE_SECCOMP_GET_FILTER, tid, index, buf.as_mut_ptr() as usize) }?;
    buf.truncate(written as usize * 8);
    Ok(Some(buf))
}

/// Returns the address of the thread's registered `struct rseq`, 0 if none.
pub(crate) fn rseq_area(tid: i32) -> io::Result<u64> {
    let mut configuration = [0u64; 3];
    // SAFETY: the request writes at most `addr` = 24 bytes.
    unsafe { ptrace(libc::PTRACE_GET_RSEQ_CONFIGURATION, tid, 24, configuration.as_mut_ptr() as usize) }?;
    Ok(configuration[0])
}

/// Returns true if the thread dispatches its system calls to a handler of its own (`PR_SET_SYSCALL_USER_DISPATCH`).
pub(crate) fn dispatches_syscalls(tid: i32) -> bool {
    let mut configuration = [0u64; 4];
    // SAFETY: the request writes `addr` = 32 bytes.
    let result =
        unsafe { ptrace(libc::PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, 32, configuration.as_mut_ptr() as usize) };
    result.is_ok() && configuration[0] != 0
}

pub(crate) fn poke(tid: i32, at: u64, word: u64) -> io::Result<()> {
    // SAFETY: data is an integer; the address is the target's, not ours.
    unsafe { ptrace(libc::PTRACE_POKEDATA, tid, at as usize, word as usize) }.map(drop)
}

/// Waits for one tracee; `Ok(None)` if `block` is false and there is no report.
///
/// The report of a signal is read without consuming it. The kernel forgets a signal whose report was consumed, so a tool killed before it
/// forwards the signal would lose it (after a lost `SIGCANCEL` a thread waits without end). Forwarding the signal removes the report as
/// well.
pub(crate) fn wait(tid: i32, block: bool) -> io::Result<Option<Wait>> {
    let flags = libc::__WALL | if block { 0 } else { libc::WNOHANG };
    // SAFETY: siginfo_t is plain data, for which all zeroes is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let look = libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT | flags;
    // SAFETY: the call writes one siginfo_t.
    if unsafe { libc::waitid(libc::P_PID, tid as libc::id_t, &raw mut info, look) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid fills in the fields of SIGCHLD, or leaves zeroes when there was nothing.
    let (pid, code) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    if info.si_code == libc::CLD_TRAPPED
        && let report @ Wait::Signal(_) = Wait::of(code << 8 | 0x7f)
    {
        return Ok(Some(report));
    }
    let mut status = 0;
    // SAFETY: the call writes one int.
    match unsafe { libc::waitpid(tid, &raw mut status, flags) } {
        0 => Ok(None),
        n if n < 0 => Err(io::Error::last_os_error()),
        _ => Ok(Some(Wait::of(status))),
    }
}

/// Returns the next child or tracee of this OS thread that has a report, without consuming the report.
pub(crate) fn peek(block: bool) -> io::Result<Option<i32>> {
    // SAFETY: siginfo_t is plain data, for which all zeroes is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED
        | libc::WSTOPPED
        | libc::WNOWAIT
        | libc::__WALL
        | libc::__WNOTHREAD
        | if block { 0 } else { libc::WNOHANG };
    // SAFETY: the call writes one siginfo_t.
    if unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid fills in the fields of SIGCHLD, or leaves zeroes when there was nothing.
    Ok(match unsafe { info.si_pid() } {
        0 => None,
        pid => Some(pid),
    })
}

pub(crate) fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain integers; a result that is not negative is a new descriptor that no other value owns.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid, 0) {
            n if n < 0 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as i32)),
        }
    }
}

/// Returns true if the process of the pidfd has ended.
pub(crate) fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, not waiting.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// Kills the process of the pidfd; one that has ended already is left alone.
pub(crate) fn kill(pidfd: &OwnedFd) {
    // SAFETY: plain integers and a null pointer, which means the information of an ordinary kill.
    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), libc::SIGKILL, ptr::null::<u8>(), 0) };
}

/// Returns true if two processes share one memory.
pub(crate) fn same_memory(a: i32, b: i32) -> io::Result<bool> {
    // SAFETY: plain integers.
    match unsafe { libc::syscall(libc::SYS_kcmp, a, b, KCMP_VM, 0, 0) } {
        n if n < 0 => Err(io::Error::last_os_error()),
        n => Ok(n == 0),
    }
}

/// Reads with `pread`, all bytes or up to the first unreadable page.
pub(crate) fn read_at(file: &File, buf: &mut [u8], at: u64) -> io::Result<usize> {
    // SAFETY: the buffer is ours and has the stated length. The offset is an address: `FileExt::read_at` would refuse the upper half of the
    // address space, which holds the vsyscall page.
    match unsafe { libc::pread64(file.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), at as i64) } {
        n if n < 0 => Err(io::Error::last_os_error()),
        n => Ok(n as usize),
    }
}

/// Reads with `process_vm_readv`, all bytes or up to the first unreadable page.
pub(crate) fn read_of_process(pid: i32, buf: &mut [u8], at: u64) -> io::Result<usize> {
    let local = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let remote = libc::iovec { iov_base: ptr::without_provenance_mut(at as usize), iov_len: buf.len() };
    // SAFETY: `local` is our buffer and has the stated length; `remote` is used in the other process only.
    match unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } {
        n if n < 0 => Err(io::Error::last_os_error()),
        n => Ok(n as usize),
    }
}

/// Slice of the tool while it runs like all others, in nanoseconds: the shortest that the kernel permits (0.1 ms, since Linux 6.12; older
/// kernels ignore it). A thread that wakes up beside the tool waits at most for the end of this slice.
pub(crate) const SLICE_NS: u64 = 100_000;

/// The kernel's default slice.
const USUAL_SLICE: u64 = 0;

/// Sets the scheduling policy of an OS thread (0: the calling one), with the lowest priority of that policy and slices of this length,
/// which only `SCHED_OTHER` changes. Returns true if the kernel allowed it. Follows sched_setattr(2).
fn set_policy(tid: i32, policy: libc::c_int, slice_ns: u64) -> bool {
    // SAFETY: plain data, for which all zeroes is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    attributes.size = size_of::<libc::sched_attr>() as u32;
    attributes.sched_policy = policy as u32;
    attributes.sched_flags = libc::SCHED_FLAG_RESET_ON_FORK as u64;
    attributes.sched_priority = u32::from(policy == libc::SCHED_FIFO);
    if policy == libc::SCHED_OTHER {
        attributes.sched_runtime = slice_ns;
    }
    // SAFETY: the call reads one sched_attr, whose size is in it.
    unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attributes, 0u32) == 0 }
}

/// Returns the policy and slice of this OS thread.
#[cfg(test)]
pub(crate) fn scheduling() -> (libc::c_int, u64) {
    // SAFETY: plain data, for which all zeroes is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the call writes one sched_attr, whose size is given.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0u32) };
    assert_eq!(done, 0, "sched_getattr: {}", io::Error::last_os_error());
    (attributes.sched_policy as libc::c_int, attributes.sched_runtime)
}

/// Gives an OS thread of this process (0: this one) the policy SCHED_FIFO, if it may: on a busy machine a tracer that waits for a processor
/// keeps its tracees stopped. Otherwise gives it the best ordinary priority. Without the permission for either all works, but more slowly.
pub(crate) fn set_fifo_class(tid: i32) {
    if !set_policy(tid, libc::SCHED_FIFO, USUAL_SLICE) {
        // SAFETY: plain integers; 0 is the calling thread.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, tid as libc::id_t, -20) };
    }
}

/// Reverts [`set_fifo_class`] and [`set_idle_class`]; returns true if the kernel allowed it.
pub(crate) fn set_default_class(tid: i32) -> bool {
    // SAFETY: plain integers; 0 is the calling thread.
    set_policy(tid, libc::SCHED_OTHER, SLICE_NS)
        && unsafe { libc::setpriority(libc::PRIO_PROCESS, tid as libc::id_t, 0) } == 0
}

/// Makes the OS thread SCHED_IDLE: it runs when no other thread wants to.
///
/// Not with short slices: the kernel protects a running thread for the shortest slice of all that wait for its processor, and at the next
/// tick it may well choose the SCHED_IDLE thread.
pub(crate) fn set_idle_class(tid: i32) {
    set_policy(tid, libc::SCHED_OTHER, USUAL_SLICE);
    set_policy(tid, libc::SCHED_IDLE, USUAL_SLICE);
}

/// Yields the processor of the calling OS thread, which is SCHED_IDLE from now on, to threads that already wait for it, and gives up its
/// saved processor time.
///
/// A thread that wakes up later preempts a SCHED_IDLE thread, but one that woke up before waits for the kernel's next tick. To the kernel a
/// SCHED_IDLE thread is a thread of small weight, which runs before all others for some milliseconds when they have had more than their
/// share. A thread that yields loses that claim (seen with Linux 6.18).
pub(crate) fn yield_processor() {
    // SAFETY: no arguments, and it cannot fail.
    unsafe { libc::sched_yield() };
}

/// Returns true if this OS thread may raise its priority again after it was lowered.
pub(crate) fn can_raise_priority() -> bool {
    set_policy(0, libc::SCHED_FIFO, USUAL_SLICE) && set_policy(0, libc::SCHED_OTHER, SLICE_NS)
}

pub(crate) fn own_tid() -> i32 {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns offset and size of an extended-state component in the non-compacted format, as the processor reports them.
pub(crate) fn state_component(index: u32) -> (usize, usize) {
    // SAFETY: every x86-64 processor has the instruction; a missing leaf reads as a harmless value, and the kernel reported the component.
    // (A safe function in newer compilers.)
    #[allow(unused_unsafe)]
    let leaf = unsafe { std::arch::x86_64::__cpuid_count(0xd, index) };
    (leaf.ebx as usize, leaf.eax as usize)
}

/// Interrupts waits of this OS thread repeatedly while armed, so that no wait is endless.
///
/// `waitpid` has no time-out, and another thread of the tool may take SIGCHLD. A timer that signals exactly this thread has neither defect;
/// its repetition covers the moment between the check and the wait.
#[derive(Debug)]
pub(crate) struct WaitTimer {
    timer: libc::timer_t,
    armed: bool,
}

impl WaitTimer {
    pub(crate) fn new() -> io::Result<WaitTimer> {
        static HANDLER: Once = Once::new();
        extern "C" fn nothing(_: libc::c_int) {}
        let signal = libc::SIGRTMAX() - 1;
        HANDLER.call_once(|| {
            // SAFETY: the handler does nothing, so it may run at any time; without SA_RESTART, because it must interrupt.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = nothing as *const () as usize;
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        });
        // SAFETY: plain data initialised before use; the timer signals this very thread, which must not block it.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = own_tid();
            let mut timer: libc::timer_t = ptr::null_mut();
            if libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(WaitTimer { timer, armed: false })
        }
    }

    /// Fires first after `first`, then every 5 ms.
    pub(crate) fn arm(&mut self, first: Duration) {
        self.set(first.max(Duration::from_micros(50)), Duration::from_millis(5));
        self.armed = true;
    }

    pub(crate) fn disarm(&mut self) {
        if self.armed {
            self.set(Duration::ZERO, Duration::ZERO);
            self.armed = false;
        }
    }

    fn set(&self, first: Duration, every: Duration) {
        let timespec = |d: Duration| libc::timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos() as i64 };
        let spec = libc::itimerspec { it_interval: timespec(every), it_value: timespec(first) };
        // SAFETY: the timer lives until drop; the call reads one itimerspec.
        unsafe { libc::timer_settime(self.timer, 0, &raw const spec, ptr::null_mut()) };
    }
}

impl Drop for WaitTimer {
    fn drop(&mut self) {
        // SAFETY: made by timer_create and deleted once.
        unsafe { libc::timer_delete(self.timer) };
    }
}
