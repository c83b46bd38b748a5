//! `stillpoint migrate guardian`: a process that outlives `run` and `fallback`, and repairs the state that they leave if they are killed.
//!
//! It waits at a pipe that is closed when the command ends in any way. A command that ends in order writes `dismissed` before.

use super::servers::{Servers, block_on};
use crate::output::Failure;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_migrate_engine::{Options, repair_interrupted};

/// Message of a command that has ended in order.
const DISMISSED: &[u8] = b"dismissed";
/// Time limit of one repair; after it, the repair is retried, since other commands wait for the journal's lock.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(6);
/// Pause between two attempts.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit for servers and proxy to become reachable.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Running guardian. Dropping it without [`Guardian::dismiss`] counts as the death of the command.
pub(super) struct Guardian {
    child: Child,
}

/// Data for a guardian; it may contain passwords, so it goes through the pipe.
#[derive(Serialize, Deserialize)]
struct Task {
    servers: Servers,
}

impl Guardian {
    /// Starts a guardian for a command with these arguments.
    pub(super) fn start(servers: &Servers) -> Result<Guardian, Failure> {
        let failed = |error: std::io::Error| Failure::refused(error).hint("the guardian process could not be started");
        // This path works even if the file has been replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.args(["migrate", "guardian"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Ctrl-C at a terminal is for the command alone.
        command.process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        let mut line = serde_json::to_vec(&Task { servers: servers.clone() }).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        child.stdin.as_mut().map_or(Ok(()), |pipe| pipe.write_all(&line)).map_err(failed)?;
        Ok(Guardian { child })
    }

    /// Ends the guardian: the command has ended in order, and there is nothing to repair.
    pub(super) fn dismiss(mut self) {
        // A guardian that has ended repairs nothing either.
        let _ = self.child.stdin.take().map(|mut pipe| pipe.write_all(DISMISSED));
        let _ = self.child.wait();
    }
}

/// Waits for the command's end, then repairs unless it was dismissed.
pub(crate) fn run() -> Result<(), Failure> {
    // A signal to a whole service, or a hangup, is meant for the command; this process ends by itself when it has nothing left to do.
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, Arc::default()).map_err(Failure::refused)?;
    }
    let mut pipe = BufReader::new(std::io::stdin());
    let mut line = String::new();
    pipe.read_line(&mut line).map_err(Failure::refused)?;
    let task: Task = serde_json::from_str(&line)
        .map_err(|error| Failure::usage(format!("`migrate guardian` is started by other commands: {error}")))?;
    let options = task.servers.options()?;
    let mut rest = Vec::new();
    // An error is an end, too.
    let _ = pipe.read_to_end(&mut rest);
    if rest == DISMISSED { Ok(()) } else { block_on(keep_repairing(&options)) }
}

async fn keep_repairing(options: &Options) {
    let begun = Instant::now();
    while !matches!(tokio::time::timeout(ATTEMPT_TIMEOUT, repair_interrupted(options)).await, Ok(Ok(())))
        && begun.elapsed() < REPAIR_TIMEOUT
    {
        tokio::time::sleep(ATTEMPT_INTERVAL).await;
    }
}
