//! Servers built by Debian's rules, with the quiescence points of `crates/patch/integrations/` and linked with
//! libstillpoint.

use crate::Unavailable;
use crate::cli::Stillpoint;
use crate::packages::{self, Binary};
use crate::shipped_program::{builder_cache, version_diff};
use crate::workspace_root;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use stillpoint_testing::recipes;

/// Directory of libstillpoint, which is built on first use.
///
/// # Errors
/// The library cannot be built on this machine.
pub fn libstillpoint() -> Result<&'static Path, Unavailable> {
    static BUILT: OnceLock<Result<PathBuf, Unavailable>> = OnceLock::new();
    let built = BUILT.get_or_init(recipes::libstillpoint);
    built.as_deref().map_err(Clone::clone)
}

/// Options of `stillpoint patch build` and `target` for the integration of this name.
///
/// # Errors
/// libstillpoint cannot be built on this machine.
pub fn options(name: &str) -> Result<Vec<OsString>, Unavailable> {
    let edits = workspace_root().join("crates/patch/integrations").join(name);
    Ok(vec!["--integration".into(), edits.into(), "--libstillpoint".into(), libstillpoint()?.into()])
}

/// A program of our own build, with the libraries of Debian's package and libstillpoint.
///
/// # Errors
/// libstillpoint cannot be built on this machine.
pub fn runnable(program: &Path, packaged: &Binary) -> Result<Binary, Unavailable> {
    let mut binary = packages::with_libraries_of(program, packaged);
    binary.libraries.insert(0, libstillpoint()?.to_owned());
    Ok(binary)
}

/// Returns the names of a process's registered threads, as `stillpoint patch status` lists them, in order.
pub fn taking_part(pid: i32) -> Vec<String> {
    let run = crate::patch_calls::status(pid).json().succeed();
    let lines = run.json();
    let threads = lines.iter().filter_map(|line| line["threads"].as_array()).flatten();
    let mut names: Vec<String> = threads.filter_map(|thread| Some(thread["name"].as_str()?.to_owned())).collect();
    names.sort_unstable();
    names
}

/// A memcached with quiescence points, and a patch that changes its answer to `version` to `VERSION stillpoint`.
///
/// # Errors
/// The package or its source cannot be fetched, or libstillpoint cannot be built.
pub fn memcached() -> Result<(Binary, PathBuf), Unavailable> {
    let versions = packages::versions_with_source(&["memcached"])?;
    let packaged = packages::memcached(Some(&versions[0]))?;
    let package = format!("memcached={}", versions[0]);
    let dir = recipes::directory("series", "memcached-annotated")?;
    let call = |command: &str| {
        let call = Stillpoint::new().args(["patch", command]).debian(&package).arg("--cache").arg(builder_cache());
        Ok::<_, Unavailable>(call.args(options("memcached")?))
    };
    let run = call("target")?.args(["--program", "memcached", "--output"]).arg(&dir).json().run();
    let program = match (run.code, run.json().last()) {
        (Some(0), Some(line)) => PathBuf::from(line["program"].as_str().unwrap_or_default()),
        _ => return Err(run.to_string().into()),
    };
    let (diff, patch) = (dir.join("version.diff"), dir.join("version.patch"));
    std::fs::write(&diff, version_diff(&versions[0])?).map_err(|e| format!("write {}: {e}", diff.display()))?;
    let build = call("build")?.arg("--diff").arg(&diff).arg("--target").arg(&program);
    build.arg("--output").arg(&patch).succeed();
    Ok((runnable(&program, &packaged)?, patch))
}
