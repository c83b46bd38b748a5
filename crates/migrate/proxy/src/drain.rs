//! The order to a proxy that serves to end, from the command line.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::time::Duration;
use stillpoint_migrate_control::{Client, Config, Reply, Request};
use tokio::time::Instant;

/// Interval at which the proxy's process is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time for the end of the process after its last session.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of a drain that was ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// Process of the proxy.
    pub process: i32,
    /// Sessions that it had when it was ordered to end.
    pub sessions: usize,
    /// The process has ended within its limit.
    pub has_ended: bool,
}

/// Orders the proxy of this configuration to end as after SIGTERM, and waits for its end.
///
/// # Errors
///
/// The reason why no proxy answers at the control socket, or why it refuses.
pub async fn drain(config: &Config) -> Result<Drained, String> {
    let at = config.control.display();
    let mut client =
        Client::connect(&config.control).await.map_err(|error| format!("no proxy answers at {at}: {error}"))?;
    let process = client.process().ok_or_else(|| format!("the process behind {at} is not known"))?;
    // Before the order: the kernel may give the number of an ended process to another one.
    let pid = Pid::from_raw(process).ok_or("the proxy's process has no number here")?;
    let process_fd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| format!("process {process}: {error}"))?;
    let reply = client.ask(&Request::Drain).await.map_err(|error| error.to_string())?;
    let Reply::Draining { sessions, limit_ms } = reply else { return Err(format!("an unexpected reply: {reply:?}")) };
    let limit = Instant::now() + Duration::from_millis(limit_ms) + END_TIMEOUT;
    let has_ended = || {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut [PollFd::new(&process_fd, PollFlags::IN)], Some(&at_once)), Ok(1))
    };
    while !has_ended() && Instant::now() < limit {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(Drained { process, sessions, has_ended: has_ended() })
}
