//! Health of units, by their own commands.

use crate::journal::{Journal, Unit};
use crate::stall_limit::StallLimit;
use procfs::process::Process;
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_kernel_checkpoint::{Error, Fill};

/// Time between two tests, and between two runs of a command.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Limit for one run of a command; one that takes longer hangs, and is run again.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs every unit's command until all have succeeded. Units are slow while their memory is not all resident: each
/// fetched byte, and each unit that serves, restarts the limit. `look` is called repeatedly.
pub(crate) fn wait_until_healthy(journal: &Journal, keepalive: &dyn Fn()) -> Result<(), Error> {
    let most = Duration::from_secs(journal.config.health_limit_s);
    let mut limit = StallLimit::new(most, Instant::now());
    for (healthy, unit) in (0u64..).zip(&journal.units) {
        let mut over = || {
            keepalive();
            limit.is_reached(Instant::now(), || healthy + resident_bytes(journal))
        };
        wait_for_unit(unit, ATTEMPT_TIMEOUT, &mut over)?;
    }
    Ok(())
}

/// Returns the bytes of memory of all units that are resident.
fn resident_bytes(journal: &Journal) -> u64 {
    let of =
        |unit: &Unit| Fill::read(&journal.image(&unit.name)).map_or(0, |fill| fill.total.saturating_sub(fill.left));
    journal.units.iter().map(of).sum()
}

/// Runs one unit's command repeatedly, each time for `attempt` at most.
fn wait_for_unit(unit: &Unit, attempt: Duration, over: &mut dyn FnMut() -> bool) -> Result<(), Error> {
    let failed = |why: String| Error::Unit { unit: unit.name.clone(), why };
    let Some((program, arguments)) = unit.health.split_first() else { return Ok(()) };
    let mut output = "it has not ended yet".to_owned();
    let mut command_run = None;
    let mut attempt_limit = StallLimit::new(attempt, Instant::now());
    loop {
        let answer = match &mut command_run {
            None => match HealthCommand::start(program, arguments) {
                Ok(started) => {
                    attempt_limit = StallLimit::new(attempt, Instant::now());
                    command_run = Some(started);
                    None
                }
                Err(error) => Some(Err(error.to_string())),
            },
            Some(running) => running.result(),
        };
        match answer {
            Some(Ok(())) => return Ok(()),
            Some(Err(why)) => (output, command_run) = (why, None),
            None if attempt_limit.is_reached(Instant::now(), || 0) => {
                (output, command_run) = ("it did not end".into(), None)
            }
            None => {}
        }
        if has_ended(unit.pid) {
            return Err(failed("its process has ended since its release".into()));
        }
        if over() {
            return Err(failed(format!("does not become healthy: {program}: {output}")));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns true if a process has ended, even if it is not reaped yet.
fn has_ended(pid: i32) -> bool {
    !Process::new(pid).and_then(|process| process.stat()).is_ok_and(|stat| !['Z', 'X'].contains(&stat.state))
}

/// A command that was started; it ends with this value, and so do all processes that it has started.
struct HealthCommand {
    child: Child,
    output: File,
}

impl HealthCommand {
    fn start(program: &str, arguments: &[String]) -> std::io::Result<Self> {
        let output = File::from(rustix::fs::memfd_create("health", MemfdFlags::CLOEXEC)?);
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
        command.process_group(0).spawn().map(|child| HealthCommand { child, output })
    }

    /// Returns the result, once it has ended; its last output is the reason of a failure.
    fn result(&mut self) -> Option<Result<(), String>> {
        let status = match self.child.try_wait() {
            Ok(status) => status?,
            Err(error) => return Some(Err(error.to_string())),
        };
        if status.success() {
            return Some(Ok(()));
        }
        let mut bytes = [0; 4096];
        let read = self.output.read_at(&mut bytes, 0).unwrap_or(0);
        let text = String::from_utf8_lossy(&bytes[..read]);
        Some(Err(text.trim().lines().last().map_or_else(|| status.to_string(), ToOwned::to_owned)))
    }
}

impl Drop for HealthCommand {
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;
    use stillpoint_kernel_checkpoint::{FetchCounts, State};

    fn unit(pid: i32, script: &str) -> Unit {
        let health = ["sh", "-c", script].map(ToOwned::to_owned).to_vec();
        Unit { pid, health, ..Unit::plain("a.service") }
    }

    fn own() -> i32 {
        std::process::id() as i32
    }

    /// Returns a command that records each of its calls in `calls` before it does anything else.
    fn counting(dir: &Path, then: &str) -> String {
        let calls = dir.join("calls").display().to_string();
        format!("echo >>{calls}; n=$(wc -l <{calls}); {then}")
    }

    #[test]
    fn a_unit_is_asked_until_it_serves_and_a_question_that_hangs_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let script = counting(dir.path(), "case $n in 1) exit 1;; 2) sleep 1000;; esac");
        wait_for_unit(&unit(own(), &script), Duration::from_millis(300), &mut || false).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("calls")).unwrap().len(), 3);
    }

    #[test]
    fn one_that_never_serves_is_given_up_with_what_it_said_last() {
        let dir = tempfile::tempdir().unwrap();
        let calls = dir.path().join("calls");
        let script = counting(dir.path(), "echo first; echo no answer from it >&2; exit 1");
        let mut over = || fs::read_to_string(&calls).is_ok_and(|calls| calls.len() > 2);
        let error = wait_for_unit(&unit(own(), &script), Duration::from_secs(60), &mut over).unwrap_err();
        assert_eq!(error.to_string(), "a.service: does not become healthy: sh: no answer from it");
    }

    #[test]
    fn one_whose_process_has_ended_is_not_waited_for() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        // it has ended, and is not reaped yet
        stillpoint_testing::wait::until("its end", || has_ended(pid).then_some(()));
        let error = wait_for_unit(&unit(pid, "exit 1"), Duration::from_secs(60), &mut || false).unwrap_err();
        assert!(error.to_string().contains("its process has ended"), "{error}");
        child.wait().unwrap();
        assert!(has_ended(pid) && !has_ended(own()));
    }

    /// Each run fetches some memory, and the last one succeeds long after a limit that began with the first.
    #[test]
    fn memory_that_is_still_fetched_restarts_the_limit() {
        let confirmed = |bring: bool| {
            let dir = tempfile::tempdir().unwrap();
            let mut journal = Journal::plain("6.1", "6.12");
            journal.config.state = dir.path().to_owned();
            journal.config.health_limit_s = 3;
            let image = journal.image("a.service");
            fs::create_dir_all(&image).unwrap();
            let left = |left| Fill { state: State::Filling, total: 20, left, counts: FetchCounts::default() };
            for n in 0..20 {
                let text = serde_json::to_string(&left(20 - n)).unwrap();
                fs::write(image.join(format!("fill-{n}")), text).unwrap();
            }
            let bring = if bring { "cp fill-$n new && mv new foam.fill;" } else { "" };
            let script = counting(&image, &format!("cd {}; {bring} sleep 0.5; test $n -ge 9", image.display()));
            journal.units.push(unit(own(), &script));
            wait_until_healthy(&journal, &|| {})
        };
        confirmed(true).unwrap();
        let error = confirmed(false).unwrap_err().to_string();
        assert!(error.contains("does not become healthy"), "{error}");
    }
}
