//! Programs of the machine that are run to their end.

use crate::Error;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs a program to its end; the text on its standard error is the reason of a failure.
///
/// # Errors
/// The program cannot be started, or fails.
pub fn run(what: &'static str, program: &str, arguments: &[&str], input: Option<&str>) -> Result<String, Error> {
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    let failed = |why: String| Error::Step { what, why: format!("{program}: {why}") };
    let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
    if let (Some(text), Some(mut pipe)) = (input, child.stdin.take()) {
        // a program that does not read its input reports the reason on its standard error
        let _ = pipe.write_all(text.as_bytes());
    }
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(failed(if said.is_empty() { output.status.to_string() } else { said }))
}

/// Runs a program without output, and ends it if it takes longer than `limit`.
///
/// # Errors
/// The program cannot be started, fails, or takes longer.
pub fn run_within(what: &'static str, program: &str, arguments: &[&str], limit: Duration) -> Result<(), Error> {
    let failed = |why: String| Error::Step { what, why: format!("{program}: {why}") };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
    let end = Instant::now() + limit;
    loop {
        match child.try_wait().map_err(|error| failed(error.to_string()))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(failed(status.to_string())),
            None if Instant::now() > end => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!("has not ended after {} s", limit.as_secs())));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
