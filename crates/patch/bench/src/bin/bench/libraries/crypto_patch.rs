//! A patch for OpenSSL's `libcrypto` as Debian ships it: one function that most of its users call, compiled from one unit.

use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_testing::{Unavailable, packages, recipes};
use tempfile::TempDir;

/// The unit that changes, as Debian's build names it from its own directory.
const UNIT: &str = "crypto/evp/digest.c";
const FUNCTION: &str = "int EVP_DigestUpdate(EVP_MD_CTX *ctx, const void *data, size_t count)";
const OLD: &str = "    if (count == 0)";
const NEW: &str = "    if (count == 0 || data == NULL)";

/// A patch, and the library that it is for.
pub(super) struct CryptoPatch {
    pub(super) file: PathBuf,
    pub(super) library: PathBuf,
    /// Directories of libraries for the programs that use it.
    pub(super) libraries: Vec<PathBuf>,
    _dir: TempDir,
}

/// Builds the patch for the newest `libcrypto` whose source the archive serves.
///
/// # Errors
/// The archive does not serve it.
pub(super) fn build() -> Result<CryptoPatch, Unavailable> {
    let package = ["libssl3"];
    let version = packages::versions_with_source(&package)?.swap_remove(0);
    let shipped = packages::binary(&package, Some(&version), "usr/lib/x86_64-linux-gnu/libcrypto.so.3")?;
    let source = configured(&version)?;
    let dir = TempDir::with_prefix("stillpoint-libraries-").map_err(|e| format!("make a directory: {e}"))?;
    let write = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).map(|()| path).map_err(|e| format!("write {name}: {e}"))
    };
    let diff = write("null-data.diff", diff(&source)?)?;
    let commands = write("compile_commands.json", compile_commands(&source, &shipped.libraries)?)?;
    let file = dir.path().join("null-data.patch");
    Stillpoint::new()
        .args(["patch", "build", "--source"])
        .arg(&source)
        .arg("--compile-commands")
        .arg(&commands)
        .arg("--target")
        .arg(&shipped.path)
        .arg("--diff")
        .arg(&diff)
        .arg("--output")
        .arg(&file)
        .succeed();
    Ok(CryptoPatch { file, library: shipped.path, libraries: shipped.libraries, _dir: dir })
}

/// Returns the source with the headers that its build generates.
fn configured(version: &str) -> Result<PathBuf, Unavailable> {
    let shipped = packages::source("openssl", version)?;
    let directory =
        recipes::entry("configured", &format!("openssl_{version}"), &[version.as_bytes().to_vec()], |tree| {
            recipes::run(Command::new("cp").arg("-a").arg(shipped.join(".")).arg(tree))?;
            let options = ["no-idea", "no-mdc2", "no-rc5", "no-ssl3", "no-ssl3-method", "enable-rfc3779", "enable-cms"];
            let mut configure = Command::new("perl");
            configure.arg("Configure").args(options).args(["shared", "linux-x86_64"]).current_dir(tree);
            recipes::run(&mut configure)?;
            recipes::run(Command::new("make").args(["-s", "build_generated"]).current_dir(tree))?;
            std::fs::create_dir_all(tree.join("build_shared")).map_err(|e| format!("make a directory: {e}"))?;
            Ok(())
        })?;
    Ok(directory)
}

/// Returns the commands of the unit, with the flags that the library itself states.
fn compile_commands(source: &Path, libraries: &[PathBuf]) -> Result<String, String> {
    let path = std::env::join_paths(libraries).map_err(|e| e.to_string())?;
    let output = Command::new("openssl").args(["version", "-f"]).env("LD_LIBRARY_PATH", path).output();
    let output = output.map_err(|e| format!("run openssl: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let flags = text.trim().strip_prefix("compiler: ").ok_or_else(|| format!("openssl states no flags: {text}"))?;
    let mut words: Vec<String> = flags.split_ascii_whitespace().map(str::to_owned).collect();
    let folders = ["..", "../include", "../providers/common/include", "../providers/implementations/include"];
    words.splice(1..1, folders.map(|folder| format!("-I{folder}")));
    let unit = format!("../{UNIT}");
    words.extend(["-c", "-o", "digest.o", &unit].map(str::to_owned));
    let directory = source.join("build_shared");
    Ok(serde_json::json!([{ "directory": directory, "file": unit, "arguments": words }]).to_string())
}

/// Returns a diff that changes one condition of the function.
fn diff(source: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(source.join(UNIT)).map_err(|e| format!("read {UNIT}: {e}"))?;
    let function = text.lines().position(|line| line == FUNCTION).ok_or("the function is not in its unit")?;
    let at = text.lines().skip(function).position(|line| line == OLD).ok_or("the function has another form")?;
    let line = function + at + 1;
    Ok(format!("--- a/{UNIT}\n+++ b/{UNIT}\n@@ -{line} +{line} @@\n-{OLD}\n+{NEW}\n"))
}
