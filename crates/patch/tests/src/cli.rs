//! Execution of the `stillpoint` binary, and its output.

use rustix::fs::{MemfdFlags, memfd_create};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_events::Event;
pub use stillpoint_testing::binary::stillpoint as binary;
use stillpoint_testing::packages::foreign_release;

/// One call of the binary.
#[derive(Debug, Clone, Default)]
pub struct Stillpoint {
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
}

impl Stillpoint {
    /// A call without arguments.
    pub fn new() -> Stillpoint {
        Stillpoint::default()
    }

    /// Adds one argument: a text, a path or a number.
    pub fn arg(mut self, argument: impl Argument) -> Stillpoint {
        self.arguments.push(argument.into_argument());
        self
    }

    /// Adds arguments.
    pub fn args<A: Argument>(mut self, arguments: impl IntoIterator<Item = A>) -> Stillpoint {
        self.arguments.extend(arguments.into_iter().map(Argument::into_argument));
        self
    }

    /// Adds a source package of the release whose packages are tested, `NAME` or `NAME=VERSION`.
    pub fn debian(self, package: &str) -> Stillpoint {
        let call = self.arg("--debian").arg(package);
        match foreign_release() {
            Some(release) => call.arg("--release").arg(release),
            None => call,
        }
    }

    /// Requests one JSON object per line, see [`Run::json`] and [`Run::events`].
    pub fn json(self) -> Stillpoint {
        self.arg("--json")
    }

    /// Sets an environment variable.
    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Stillpoint {
        self.environment.push((key.into(), value.into()));
        self
    }

    /// Returns the command, for callers that start it themselves.
    pub fn command(&self) -> Command {
        let mut command = Command::new(binary());
        command.args(&self.arguments).envs(self.environment.iter().map(|(k, v)| (k, v)));
        command.stdin(Stdio::null());
        command
    }

    /// Runs it to its end.
    pub fn run(&self) -> Run {
        let output = self.command().output().unwrap_or_else(|e| panic!("run {}: {e}", binary().display()));
        Run {
            line: self.to_string(),
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Runs it to its end; its output goes to memory, and no thread reads it meanwhile.
    pub fn run_unread(&self) -> UnreadRun {
        let file = || File::from(memfd_create("printed", MemfdFlags::CLOEXEC).expect("make a file in memory"));
        let (stdout, stderr) = (file(), file());
        let for_child = |file: &File| file.try_clone().expect("a second descriptor");
        let status = self.command().stdout(for_child(&stdout)).stderr(for_child(&stderr)).status();
        let status = status.unwrap_or_else(|e| panic!("run {}: {e}", binary().display()));
        UnreadRun { line: self.to_string(), code: status.code(), stdout, stderr }
    }

    /// Runs it to its end; panics with all its output unless it exits with 0.
    #[track_caller]
    pub fn succeed(&self) -> Run {
        let run = self.run();
        assert_eq!(run.code, Some(0), "{run}");
        run
    }
}

/// A completed call with unread output: readers take the processor from the measured processes.
#[derive(Debug)]
pub struct UnreadRun {
    line: String,
    code: Option<i32>,
    stdout: File,
    stderr: File,
}

impl UnreadRun {
    /// Reads the output.
    pub fn read(self) -> Run {
        let text = |mut file: File| {
            let mut bytes = Vec::new();
            file.rewind().and_then(|()| file.read_to_end(&mut bytes)).expect("read a file in memory");
            String::from_utf8_lossy(&bytes).into_owned()
        };
        Run { line: self.line, code: self.code, stdout: text(self.stdout), stderr: text(self.stderr) }
    }
}

impl fmt::Display for Stillpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stillpoint")?;
        self.arguments.iter().try_for_each(|word| write!(f, " {}", word.to_string_lossy()))
    }
}

/// Types of an argument.
pub trait Argument {
    /// Returns the argument as the program receives it.
    fn into_argument(self) -> OsString;
}

macro_rules! is_argument {
    (text: $($text:ty)*; number: $($number:ty)*) => {
        $(impl Argument for $text {
            fn into_argument(self) -> OsString {
                let text: &OsStr = self.as_ref();
                text.to_owned()
            }
        })*
        $(impl Argument for $number {
            fn into_argument(self) -> OsString {
                self.to_string().into()
            }
        })*
    };
}
is_argument!(text: &str String &String &Path PathBuf &PathBuf &OsStr OsString; number: i32 u16 u32 u64 usize);

/// Result and output of a call. Displays as all of it.
#[derive(Debug, Clone)]
pub struct Run {
    /// The command line, for messages.
    pub line: String,
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Run {
    /// Returns the objects printed with `--json`, one per line; panics on any other line.
    #[track_caller]
    pub fn json(&self) -> Vec<serde_json::Value> {
        let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line:?} is not JSON: {e}\n{self}"));
        self.stdout.lines().map(parse).collect()
    }

    /// Returns the objects that are events.
    #[track_caller]
    pub fn events(&self) -> Vec<Event> {
        self.json().into_iter().filter_map(|value| serde_json::from_value(value).ok()).collect()
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code.map_or_else(|| "a signal".to_owned(), |code| format!("exit {code}"));
        write!(f, "`{}`: {code}\n--- stdout\n{}--- stderr\n{}", self.line, self.stdout, self.stderr)
    }
}
