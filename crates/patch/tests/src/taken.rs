//! Servers that are taken into images and brought back.

use crate::cli::{Run, Stillpoint};
use crate::packages::Binary;
use crate::wait;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

/// A criu that works on this kernel, or why there is none.
pub fn criu() -> &'static Result<PathBuf, String> {
    static CRIU: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    CRIU.get_or_init(|| {
        let criu = stillpoint_testing::recipes::criu()?.join("criu");
        let checked = Command::new(&criu).arg("check").output().map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        if checked.status.success() { Ok(criu) } else { Err(format!("criu does not work here: {said}")) }
    })
}

/// Runs its arguments with no descriptor open but the first three: those of the test cannot be taken along.
const CLOSED: &str =
    r#"for fd in /proc/self/fd/*; do fd=${fd##*/}; [ "$fd" -le 2 ] || eval "exec $fd>&-"; done; exec "$@""#;

/// A server that is taken and brought back. It ends with this value, whoever its parent is by then.
#[derive(Debug)]
pub struct Taken {
    child: Option<Child>,
    pid: i32,
    images: TempDir,
}

impl Taken {
    /// Starts it in a session of its own, with nothing open of the caller's.
    pub fn start(binary: &Binary, arguments: &[OsString], dir: &Path) -> Taken {
        let out = File::create(dir.join("out")).expect("a file for what it prints");
        let mut command = Command::new("setsid");
        command.args(["bash", "-c", CLOSED, "bash"]).arg(&binary.path).args(arguments).envs(binary.environment());
        command.current_dir(dir).stdin(Stdio::null()).stderr(out.try_clone().expect("one file for both")).stdout(out);
        let child = command.spawn().expect("start a program");
        let pid = child.id() as i32;
        // memory: a file system there takes files as long as an address space
        let images = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory for images");
        Taken { child: Some(child), pid, images }
    }

    /// Into an image, and back out of it; what the two had to say comes back.
    #[track_caller]
    pub fn there_and_back(&mut self, criu: &Path, name: &str) -> (Run, Run) {
        let image = self.images.path().join(name);
        let kernel =
            |verb: &str| Stillpoint::new().json().args(["kernel", verb, "--criu"]).arg(criu).arg("--image").arg(&image);
        // memory that still comes after the last restore is refused, and nothing is touched
        let checkpoint = kernel("checkpoint").arg("--pid").arg(self.pid);
        let taken = wait::until("its memory to have come", || Some(checkpoint.run()).filter(|run| !still_comes(run)));
        assert_eq!(taken.code, Some(0), "{taken}\n{}", log(&image.join("dump.log")));
        self.until_gone();
        let restored = kernel("restore").run();
        assert_eq!(restored.code, Some(0), "{restored}\n{}", log(&image.join("restore.log")));
        (taken, restored)
    }

    /// Its number, before and after.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// A directory for its images.
    pub fn images(&self) -> &Path {
        self.images.path()
    }

    /// Waits until it has ended with its checkpoint: its number is free only then.
    pub fn until_gone(&mut self) {
        self.reap();
        wait::until("it to be gone", || (!Path::new(&format!("/proc/{}", self.pid)).exists()).then_some(()));
    }

    fn reap(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.wait().expect("wait for a child");
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", &self.pid.to_string()]).stderr(Stdio::null()).status();
        self.reap();
    }
}

fn still_comes(run: &Run) -> bool {
    run.code == Some(3) && run.stderr.contains("its memory still comes out of an image")
}

/// The end of a log.
fn log(path: &Path) -> String {
    let lines: Vec<String> =
        File::open(path).into_iter().flat_map(|file| BufReader::new(file).lines().map_while(Result::ok)).collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
