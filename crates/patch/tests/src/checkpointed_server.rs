//! Servers that are checkpointed and restored.

use crate::cli::{Run, Stillpoint};
use crate::packages::Binary;
use crate::wait;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use stillpoint_testing::child::reap;
use tempfile::TempDir;

/// Returns a criu that works on this kernel, or the reason why there is none.
///
/// # Errors
/// The reason why criu cannot be built, or does not work on this kernel.
pub fn criu() -> &'static Result<PathBuf, String> {
    static CRIU: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    CRIU.get_or_init(|| {
        let criu = stillpoint_testing::recipes::criu()?.join("criu");
        let checked = Command::new(&criu).arg("check").output().map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        if checked.status.success() { Ok(criu) } else { Err(format!("criu does not work here: {said}")) }
    })
}

/// Runs its arguments with only the first three descriptors open: those of the test cannot be checkpointed.
const CLOSED: &str =
    r#"for fd in /proc/self/fd/*; do fd=${fd##*/}; [ "$fd" -le 2 ] || eval "exec $fd>&-"; done; exec "$@""#;

/// A server that is checkpointed and restored. It ends with this value, also if its parent has changed.
#[derive(Debug)]
pub struct CheckpointedServer {
    child: Option<Child>,
    pid: i32,
    images: TempDir,
}

impl CheckpointedServer {
    /// Starts it in a session of its own, without open files of the caller.
    pub fn start(binary: &Binary, arguments: &[OsString], dir: &Path) -> CheckpointedServer {
        let out = File::create(dir.join("out")).expect("a file for what it prints");
        let mut command = Command::new("setsid");
        command.args(["bash", "-c", CLOSED, "bash"]).arg(&binary.path).args(arguments).envs(binary.environment());
        command.current_dir(dir).stdin(Stdio::null()).stderr(out.try_clone().expect("one file for both")).stdout(out);
        let child = command.spawn().expect("start a program");
        let pid = child.id() as i32;
        // memory: writing to a file system takes time, and such a file holds a whole address space
        let images = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory for images");
        CheckpointedServer { child: Some(child), pid, images }
    }

    /// Writes it into an image, and restores it; returns the results of both calls.
    #[track_caller]
    pub fn there_and_back(&mut self, criu: &Path, name: &str) -> (Run, Run) {
        let image = self.images.path().join(name);
        let kernel =
            |verb: &str| Stillpoint::new().json().args(["kernel", verb, "--criu"]).arg(criu).arg("--image").arg(&image);
        // a checkpoint is refused without effect while memory of the last restore is still being loaded
        let checkpoint = kernel("checkpoint").arg("--pid").arg(self.pid);
        let taken = wait::until("its memory to have come", || Some(checkpoint.run()).filter(|run| !still_comes(run)));
        assert_eq!(taken.code, Some(0), "{taken}\n{}", log(&image.join("dump.log")));
        self.until_gone();
        let restored = kernel("restore").run();
        assert_eq!(restored.code, Some(0), "{restored}\n{}", log(&image.join("restore.log")));
        (taken, restored)
    }

    /// Returns its process id, the same before and after.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns the directory for its images.
    pub fn images(&self) -> &Path {
        self.images.path()
    }

    /// Waits until it has ended with its checkpoint: its process id is free only then.
    pub fn until_gone(&mut self) {
        reap(&mut self.child);
        wait::until("it to be gone", || (!Path::new(&format!("/proc/{}", self.pid)).exists()).then_some(()));
    }
}

impl Drop for CheckpointedServer {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", &self.pid.to_string()]).stderr(Stdio::null()).status();
        reap(&mut self.child);
    }
}

fn still_comes(run: &Run) -> bool {
    run.code == Some(3) && run.stderr.contains("its memory is still being fetched from an image")
}

/// Returns the end of a log.
fn log(path: &Path) -> String {
    let lines: Vec<String> =
        File::open(path).into_iter().flat_map(|file| BufReader::new(file).lines().map_while(Result::ok)).collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
