//! `stillpoint migrate guardian`: a process that outlives `run` and `fallback`, and heals what their death leaves.
//!
//! It waits at a pipe that ends with the command, however that ends. A command that knows what it leaves says so before.

use super::servers::{Servers, quietly};
use crate::output::Failure;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_migrate_engine::{Options, heal};

/// What a command says that has ended in order.
const DISMISSED: &[u8] = b"dismissed";
/// A heal that takes longer is given up and tried again: others wait for the journal's lock.
const ATTEMPT: Duration = Duration::from_secs(6);
/// Between two attempts.
const BETWEEN: Duration = Duration::from_millis(500);
/// For so long servers and proxy are waited for.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// A guardian at work. Whoever drops it without [`Guardian::dismiss`] is taken for dead.
pub(super) struct Guardian {
    child: Child,
}

/// What a guardian must know; it may hold passwords, so it goes through the pipe.
#[derive(Serialize, Deserialize)]
struct Task {
    servers: Servers,
}

impl Guardian {
    /// Starts one for a command with these arguments.
    pub(super) fn start(servers: &Servers) -> Result<Guardian, Failure> {
        let failed = |error: std::io::Error| Failure::refused(error).hint("a process could not be started");
        // Also where the file has been replaced meanwhile.
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

    /// The command has ended in order: there is nothing to heal.
    pub(super) fn dismiss(mut self) {
        // One that is gone heals nothing either.
        let _ = self.child.stdin.take().map(|mut pipe| pipe.write_all(DISMISSED));
        let _ = self.child.wait();
    }
}

/// Waits for the command's end, then heals unless it was dismissed.
pub(crate) fn run() -> Result<(), Failure> {
    // Whoever ends a whole service, or hangs up, means the command; this ends by itself when there is nothing left to do.
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
    // An error is an end too.
    let _ = pipe.read_to_end(&mut rest);
    if rest == DISMISSED { Ok(()) } else { quietly(keep_healing(&options)) }
}

async fn keep_healing(options: &Options) {
    let begun = Instant::now();
    while !matches!(tokio::time::timeout(ATTEMPT, heal(options)).await, Ok(Ok(()))) && begun.elapsed() < PATIENCE {
        tokio::time::sleep(BETWEEN).await;
    }
}
