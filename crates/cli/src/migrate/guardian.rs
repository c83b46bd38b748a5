//! `stillpoint migrate guardian`: a process that outlives `run` and `fallback`, and repairs the state that they leave if they are killed.
//!
//! It is a guardian of `stillpoint_operation`; its task is the servers of the command.

use super::servers::{Servers, block_on};
use crate::output::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_migrate_engine::{Options, repair_interrupted};
use stillpoint_operation::{Guardian, Request, Requests};

/// Time limit of one repair; after it, the repair is retried, since other commands wait for the journal's lock.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(6);
/// Pause between two attempts.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit for servers and proxy to become reachable.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Starts a guardian for a command on these servers.
///
/// # Errors
///
/// The process cannot be started.
pub(super) fn start(servers: &Servers) -> Result<Guardian, Failure> {
    let task = serde_json::to_vec(servers).map_err(Failure::refused)?;
    // The reader of the command's errors must not wait for the guardian.
    let guardian = Guardian::start(&["migrate", "guardian"], &task, None, Stdio::null());
    guardian.map_err(|error| Failure::refused(error).hint("the guardian process could not be started"))
}

/// Waits for the command's end, then repairs unless it was dismissed.
pub(crate) fn run() -> Result<(), Failure> {
    // A signal to a whole service, or a hangup, is meant for the command; this process ends by itself when it has nothing left to do.
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, Arc::default()).map_err(Failure::refused)?;
    }
    let by_hand = |error: &dyn std::fmt::Display| {
        Failure::usage(format!("`migrate guardian` is started by other commands: {error}"))
    };
    let (mut requests, task) = Requests::from_stdin().map_err(|error| by_hand(&error))?;
    let servers: Servers = serde_json::from_slice(&task).map_err(|error| by_hand(&error))?;
    let options = servers.options()?;
    loop {
        match requests.wait().map_err(Failure::refused)? {
            Request::Dismissed => return Ok(()),
            Request::Killed => return block_on(keep_repairing(&options)),
            Request::Asked(request) => requests.answer(request),
        }
    }
}

async fn keep_repairing(options: &Options) {
    let begun = Instant::now();
    while !matches!(tokio::time::timeout(ATTEMPT_TIMEOUT, repair_interrupted(options)).await, Ok(Ok(())))
        && begun.elapsed() < REPAIR_TIMEOUT
    {
        tokio::time::sleep(ATTEMPT_INTERVAL).await;
    }
}
