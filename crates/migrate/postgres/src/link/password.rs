//! Password of our role: given once, or printed by a command each time that it is needed. Hosting providers give passwords that are
//! valid for minutes only.

use super::error::ServerError;
use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use zeroize::Zeroizing;

/// Time that a password from a command is used again: many sessions connect at the same moment.
const REUSE_TIME: Duration = Duration::from_secs(30);
/// Time for the command to print it.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(15);
/// Length limit of its output in bytes; tokens of providers have less than 2 KiB.
const PASSWORD_MAX: u64 = 64 << 10;

/// Source of a password.
#[derive(Clone)]
pub(super) enum Password {
    Given(Zeroizing<Vec<u8>>),
    /// Shell command that prints it.
    Command(String),
}

impl Password {
    /// Returns the password; the line end of a command's output is not part of it.
    pub(super) async fn read(&self, server: &str) -> Result<Zeroizing<Vec<u8>>, ServerError> {
        type Printed = (Instant, Zeroizing<Vec<u8>>);
        static PRINTED: Mutex<BTreeMap<String, Printed>> = Mutex::new(BTreeMap::new());
        let command = match self {
            Password::Given(password) => return Ok(password.clone()),
            Password::Command(command) => command,
        };
        if let Some((at, printed)) = PRINTED.lock().unwrap_or_else(PoisonError::into_inner).get(command)
            && at.elapsed() < REUSE_TIME
        {
            return Ok(printed.clone());
        }
        let failed = |why: String| ServerError::PasswordCommand { server: server.into(), why };
        let printed = tokio::time::timeout(COMMAND_TIMEOUT, run(command)).await;
        let printed = printed.map_err(|_| failed(format!("it took longer than {} s", COMMAND_TIMEOUT.as_secs())))?;
        let printed = printed.map_err(failed)?;
        let mut known = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(command.clone(), (Instant::now(), printed.clone()));
        Ok(printed)
    }
}

async fn run(command: &str) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = shell.spawn().map_err(|error| error.to_string())?;
    let mut printed = Zeroizing::new(Vec::new());
    if let Some(out) = child.stdout.take() {
        out.take(PASSWORD_MAX + 1).read_to_end(&mut printed).await.map_err(|error| error.to_string())?;
    }
    if printed.len() as u64 > PASSWORD_MAX {
        return Err(format!("it printed more than {PASSWORD_MAX} bytes"));
    }
    let status = child.wait().await.map_err(|error| error.to_string())?;
    if !status.success() {
        return Err(status.to_string());
    }
    while printed.last().is_some_and(|last| b"\r\n".contains(last)) {
        printed.pop();
    }
    if printed.is_empty() { Err("it printed nothing".into()) } else { Ok(printed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_command_prints_the_password_and_its_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count").display().to_string();
        let read = async |command: &str| {
            let password = Password::Command(command.to_owned()).read("source").await;
            password.map(|password| String::from_utf8_lossy(&password).into_owned()).map_err(|error| error.to_string())
        };
        let command = format!("echo x >> {count}; printf 'p w\\n'");
        assert_eq!(read(&command).await, Ok("p w".into()));
        assert_eq!(read(&command).await, Ok("p w".into()));
        assert_eq!(std::fs::read_to_string(&count).unwrap(), "x\n", "it is used again");
        let told = read("echo secret; exit 3").await.unwrap_err();
        assert!(told.contains("exit status: 3") && !told.contains("secret"), "{told}");
        assert!(read("true").await.unwrap_err().contains("printed nothing"));
    }
}
