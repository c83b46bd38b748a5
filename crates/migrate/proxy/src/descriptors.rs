//! Open files: a session takes up to three, and a process usually begins with 1,024.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stillpoint_migrate_control::Config;

/// Files of a session: its client, its server, and the counterpart on the target.
const FILES_PER_SESSION: u64 = 3;
/// Files for the proxy's own sockets, files and threads, and for requests to cancel.
const OTHER_FILES: u64 = 128;

/// Raises the limit to what the configuration needs, as far as the system allows. Returns a text if that is too few.
pub(crate) fn raise(config: &Config) -> Option<String> {
    let limit = getrlimit(Resource::Nofile);
    let (needed, now) = (needed(config), limit.current.unwrap_or(u64::MAX));
    let most = limit.maximum.unwrap_or(u64::MAX);
    if now < needed {
        let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(needed.min(most)), ..limit });
        if let Err(error) = raised {
            tracing::warn!(%error, "the limit of open files cannot be raised");
        }
    }
    shortage(needed, most, config.limits.connections)
}

/// Returns the same text, without raising the limit.
pub(crate) fn warning(config: &Config) -> Option<String> {
    shortage(needed(config), getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX), config.limits.connections)
}

fn needed(config: &Config) -> u64 {
    config.limits.connections as u64 * FILES_PER_SESSION + config.limits.unnamed as u64 + OTHER_FILES
}

fn shortage(needed: u64, most: u64, connections: usize) -> Option<String> {
    (most < needed).then(|| {
        format!(
            "the limit of {most} open files allows {} connections during a migration, not {connections}: raise it \
             (LimitNOFILE, `ulimit -Hn`) to {needed}",
            most.saturating_sub(needed - connections as u64 * FILES_PER_SESSION) / FILES_PER_SESSION
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_takes_three() {
        assert_eq!(shortage(3256, 4096, 1000), None);
        let text = shortage(3256, 1024, 1000).unwrap();
        assert!(text.contains("256 connections") && text.contains("to 3256"), "{text}");
    }
}
