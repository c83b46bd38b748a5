//! Choice of the thread that carries remote calls.
//!
//! A remote call borrows a thread's registers and some kilobytes of its stack below the red zone. The thread must have a user side, and
//! must be stopped on its own stack with room left. The best thread is one that `rt_sigreturn` can restore completely if the tool is killed
//! during the call.
//!
//! If there is no better one, the carrier is a thread in `nanosleep` or in `poll` with a time-out: it continues with the rest of its sleep.
//! Only a tool that is killed during the call makes it begin the sleep again.

use crate::registers::{RED_ZONE, Registers};
use crate::tracer::{State, Tracer};
use crate::{Error, Mapping, Process, ThreadActivity, Tid, sys};
use stillpoint_patch_format::Avma;

/// Room below the red zone in bytes: for the frame (3-12 KiB, depending on the processor) and for the stack of a hook.
const STACK_ROOM_BYTES: u64 = 16 << 10;

/// Number of best-ranked threads that is enough: other threads of a large program are not examined before these have failed.
const CANDIDATES_MAX: usize = 8;
/// Rank of a thread that was not examined.
const RANK_UNKNOWN: u8 = 4;

/// Returns all threads, the fittest first. Reads only `/proc`.
pub(crate) fn by_fitness(tracer: &Tracer) -> Vec<i32> {
    let mut best = 0;
    let threads = tracer.threads.iter().filter(|(_, thread)| !matches!(thread.state, State::Expected));
    let mut threads: Vec<(u8, i32)> = threads
        .map(|(&tid, thread)| {
            let rank = match &thread.state {
                State::Stopped(stop_state) => match stop_state.registers {
                    Some(registers) => rank(registers.syscall().map(|nr| (nr, registers.syscall_args()))),
                    None => 1,
                },
                _ if best >= CANDIDATES_MAX => RANK_UNKNOWN,
                _ => match tracer.process.activity(Tid(tid)) {
                    Ok(ThreadActivity { waits_in, .. }) => rank(waits_in),
                    Err(_) => 9,
                },
            };
            best += usize::from(rank == 0);
            (rank, tid)
        })
        .collect();
    threads.sort_unstable();
    threads.into_iter().map(|(_, tid)| tid).collect()
}

/// Returns the rank of a thread by the system call in which it waits; lower is better.
fn rank(waits_in: Option<(u64, [u64; 6])>) -> u8 {
    let Some((nr, args)) = waits_in else {
        // It runs: fit, but it has work to do.
        return 3;
    };
    let no_limit = args[2] as i32 == -1;
    match nr as i64 {
        // Sleeps without a time-out: no sleep starts again.
        libc::SYS_read | libc::SYS_accept | libc::SYS_accept4 | libc::SYS_recvfrom | libc::SYS_recvmsg => 0,
        libc::SYS_poll if no_limit => 0,
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait if args[3] as i32 == -1 => 0,
        libc::SYS_futex if args[3] == 0 => 0,
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => 1,
        // These continue through a restart block. After ptrace restores them they do so. If the tool is killed, rt_sigreturn clears the
        // restart block and the frame starts the sleep again. They are used only if there is no other thread.
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_poll | libc::SYS_futex => 5,
        libc::SYS_restart_syscall => 5,
        // May wait for the child of a vfork.
        libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => 8,
        _ => 2,
    }
}

/// Returns the reason why a stopped thread cannot carry remote calls, if there is one.
pub(crate) fn fault(tracer: &mut Tracer, tid: i32) -> Result<Option<String>, Error> {
    let mappings = tracer.process.mappings()?;
    fault_among(tracer, tid, &mappings)
}

/// Returns the reason why a stopped thread of a process with these mappings cannot carry remote calls, if there is one.
pub(crate) fn fault_among(tracer: &mut Tracer, tid: i32, mappings: &[Mapping]) -> Result<Option<String>, Error> {
    if !tracer.stop_state(tid)?.trap {
        return Ok(Some("it is stopped in the middle of a system call".to_owned()));
    }
    let registers = tracer.registers(tid)?;
    if registers.has_no_user_side() {
        return Ok(Some("it has no user side (a worker of the kernel)".to_owned()));
    }
    let Some(stack) = own_stack(&tracer.process, tid, &registers, mappings) else {
        return Ok(Some("it is not on its own stack (coroutine or alternate signal stack)".to_owned()));
    };
    if registers.rsp - stack.start.0 < STACK_ROOM_BYTES + RED_ZONE {
        return Ok(Some(format!("its stack has only {} bytes left", registers.rsp - stack.start.0)));
    }
    if tracer.process.thread_status(Tid(tid))?.shadow_stack == Some(true) {
        return Ok(Some("it has a shadow stack".to_owned()));
    }
    if sys::dispatches_syscalls(tid) {
        return Ok(Some("it dispatches its system calls to itself (PR_SET_SYSCALL_USER_DISPATCH)".to_owned()));
    }
    if in_restartable_sequence(tracer, tid) {
        return Ok(Some("it is in a restartable sequence".to_owned()));
    }
    Ok(None)
}

/// Returns true if the thread is in a restartable sequence. The kernel forgets the sequence when it finds the thread elsewhere; a thread
/// that is put back inside would continue unprotected.
fn in_restartable_sequence(tracer: &Tracer, tid: i32) -> bool {
    // Kernels before 5.13 cannot report it, and glibc before 2.35 registers none.
    match sys::rseq_area(tid) {
        Ok(area) if area != 0 => tracer.process.memory().read_u64(Avma(area + 8)).map_or(true, |current| current != 0),
        _ => false,
    }
}

/// Returns the part of the thread's own stack from its lowest byte to the end, if the thread is on it. That is the mapping below its thread
/// control block (glibc puts the block at the top of every stack, also of stacks that the program provides), or `[stack]` for the first
/// thread.
fn own_stack(process: &Process, tid: i32, registers: &Registers, mappings: &[Mapping]) -> Option<Mapping> {
    let sp = Avma(registers.rsp);
    let mut stack = mappings.iter().find(|m| m.contains(sp) && m.read && m.write)?.clone();
    // The first thread of a process that another thread forked is on that thread's stack.
    if tid == process.pid().0 && stack.path.as_deref() == Some("[stack]") {
        return Some(stack);
    }
    let control_block = Avma(registers.fs_base);
    if !stack.contains(control_block) || control_block <= sp {
        return None;
    }
    stack.end = control_block;
    Some(stack)
}
