//! Programs under test: they end when their handle is dropped, also when the test panics or is killed.

use crate::wait;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

/// Returns a command that runs `program` as the child itself (same pid); the kernel ends the child if the *calling
/// thread* ends first. Add arguments and pipes as usual, spawn, and pass the child to [`ChildGuard`].
pub fn bound_command(program: &Path) -> Command {
    // `setpriv` sets the parent-death signal and then executes the program in its own place: the standard library has
    // no safe way to do so between fork and exec.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Runs a program to its end.
///
/// # Errors
/// The program cannot be started, or it fails; with its error output.
pub fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {text}")) }
}

/// Waits for a child that was not waited for yet.
///
/// # Panics
/// The kernel does not let it be waited for.
pub fn reap(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        child.wait().expect("wait for a child");
    }
}

/// A child process that is ended when dropped.
#[derive(Debug)]
pub struct ChildGuard {
    child: Child,
}

impl ChildGuard {
    /// Takes over a child that runs already.
    pub fn from_child(child: Child) -> ChildGuard {
        ChildGuard { child }
    }

    /// Returns its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Returns the child itself, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Returns its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Sends a signal; does nothing if the child has ended already.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            // The child is not reaped yet, so the pid is its own; ESRCH cannot happen.
            kill_process(self.raw_pid(), signal).expect("signal a child");
        }
    }

    /// Ends it by SIGTERM, or after ten seconds by SIGKILL, and returns its exit status.
    pub fn end(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        // If it is stopped (by SIGSTOP or by a leftover of a tracer), it would not handle SIGTERM.
        self.signal(Signal::CONT);
        wait::within(Duration::from_secs(10), || self.ended()).unwrap_or_else(|| {
            self.signal(Signal::KILL);
            self.child.wait().expect("a child can be waited for")
        })
    }

    fn raw_pid(&self) -> Pid {
        Pid::from_raw(self.pid()).expect("a child's pid is positive")
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.end();
        }
    }
}
