//! A shell on the machine's second serial line. Each boot starts a new one.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Output and exit code of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its exit code.
    pub code: i32,
    /// Standard output and standard error.
    pub text: String,
}

pub(crate) struct Shell {
    stream: UnixStream,
    next: u32,
    pending: Vec<u8>,
    /// A command did not end: the shell may have half of it.
    stale: bool,
}

impl Shell {
    pub(crate) fn new(stream: UnixStream) -> std::io::Result<Shell> {
        stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        Ok(Shell { stream, next: 0, pending: Vec::new(), stale: false })
    }

    /// Runs a command; `None` if it did not end within the limit.
    pub(crate) fn run(&mut self, command: &str, limit: Duration) -> Option<Output> {
        self.next += 1;
        let (n, end) = (self.next, Instant::now() + limit);
        if std::mem::replace(&mut self.stale, true) {
            // discards half a line, and a quote that it may have opened; the terminal drops its pending input
            self.stream.write_all(b"\x03").ok()?;
            std::thread::sleep(Duration::from_millis(200));
        }
        self.pending.clear();
        // The marks are not spelled as they are printed, so that an echo of the line is not taken for a mark.
        let line = format!(
            "\nprintf '\\nbeg%s\\n' in-{n}; {{ {command}\n}} 2>&1 </dev/null; printf '\\nen%s:%s\\n' d-{n} $?\n"
        );
        self.stream.write_all(line.as_bytes()).ok()?;
        let (begin, done) = (format!("\nbegin-{n}\n"), format!("\nend-{n}:"));
        while Instant::now() < end {
            self.read();
            let text = String::from_utf8_lossy(&self.pending).replace('\r', "");
            let Some((_, rest)) = text.split_once(&begin) else { continue };
            let Some((said, rest)) = rest.split_once(&done) else { continue };
            let Some((code, _)) = rest.split_once('\n') else { continue };
            let text = said.lines().filter(|line| !is_echo(line)).collect::<Vec<_>>().join("\n");
            self.stale = false;
            return Some(Output { code: code.trim().parse().ok()?, text });
        }
        None
    }

    fn read(&mut self) {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => std::thread::sleep(Duration::from_millis(50)),
            Ok(n) => self.pending.extend_from_slice(&buffer[..n]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Returns true for lines in which the terminal has echoed the input.
fn is_echo(line: &str) -> bool {
    line.contains("printf '\\n") || line.starts_with("> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_said_is_told_from_what_was_typed() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let answering = std::thread::spawn(move || {
            let mut typed = [0; 256];
            let n = theirs.read(&mut typed).unwrap();
            let echo = String::from_utf8_lossy(&typed[..n]).replace('\n', "\r\n");
            theirs.write_all(echo.as_bytes()).unwrap();
            theirs.write_all(b"\r\nbegin-1\r\n6.1.0\r\nsecond\r\nend-1:3\r\n").unwrap();
        });
        let output = Shell::new(ours).unwrap().run("uname -r", Duration::from_secs(20)).unwrap();
        assert_eq!(output, Output { code: 3, text: "6.1.0\nsecond".into() });
        answering.join().unwrap();
    }
}
