//! go-tpc: TPC-C, for MariaDB and PostgreSQL.

use crate::Unavailable;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

const MODULE: &str = "github.com/pingcap/go-tpc";
/// The single version that the published numbers belong to.
pub const VERSION: &str = "v1.0.12";

/// Returns the program, built once with this machine's Go, or with Debian's if there is none. The error is the reason
/// why it is missing.
pub fn go_tpc() -> &'static Result<PathBuf, Unavailable> {
    static BUILT: OnceLock<Result<PathBuf, Unavailable>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let made = crate::recipes::entry("go", "go-tpc", &[MODULE.into(), VERSION.into()], build);
        made.map(|entry| entry.join("go-tpc"))
    })
}

/// Returns the Go of this machine, or Debian's, unpacked.
fn go() -> Result<(PathBuf, Option<PathBuf>), Unavailable> {
    let version = Command::new("go").arg("version").stderr(Stdio::null()).output();
    if version.is_ok_and(|out| out.status.success()) {
        return Ok((PathBuf::from("go"), None));
    }
    let binary = crate::packages::binary(&["golang-1.19-go"], None, "usr/lib/go-1.19/bin/go")?;
    let root = binary.path.ancestors().nth(2).map(Path::to_owned);
    Ok((binary.path, root))
}

fn build(into: &Path) -> Result<(), Unavailable> {
    let (go, root) = go()?;
    // Modules and objects are used only once.
    let work = tempfile::tempdir().map_err(|e| format!("make a directory: {e}"))?;
    let run = |arguments: &[&str], dir: &Path| {
        let mut command = Command::new(&go);
        command.args(arguments).current_dir(dir).env("GOPATH", work.path().join("path"));
        command.env("GOCACHE", work.path().join("objects")).env("GOFLAGS", "-modcacherw").env("GOTOOLCHAIN", "local");
        command.env("CGO_ENABLED", "0").envs(root.as_ref().map(|root| ("GOROOT", root)));
        let out = command.output().map_err(|e| format!("run go: {e}"))?;
        let errors = String::from_utf8_lossy(&out.stderr);
        match out.status.success() {
            true => Ok(String::from_utf8_lossy(&out.stdout).into_owned()),
            false => Err(Unavailable::from(errors.lines().last().unwrap_or("go fails"))),
        }
    };
    // In the module's own directory, so that its own list of checksums decides what it is built with.
    let told = run(&["mod", "download", "-json", &format!("{MODULE}@{VERSION}")], work.path())?;
    let told: serde_json::Value = serde_json::from_str(&told).map_err(|e| format!("go printed {told:?}: {e}"))?;
    let source = told["Dir"].as_str().ok_or("go does not report where the module is located")?;
    let program = into.join("go-tpc").display().to_string();
    run(&["build", "-o", &program, "./cmd/go-tpc"], Path::new(source)).map(drop)
}
