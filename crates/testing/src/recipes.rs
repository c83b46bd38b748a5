//! Recipes of files that tests take from outside the tree, and the cache that keeps the results.
//!
//! The name of each entry has a hash of its scripts, of the files that they read, and of the compiler if one is used;
//! the tree's own path is not included, so that another checkout finds the entry.

use crate::{Unavailable, workspace_root};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use stillpoint_host::cache::{self, Cache, EntryName};

/// Entries that can be made by name (`cargo run -p xtask -- cache path NAME`), with their arguments.
pub const NAMES: [&str; 8] = [
    "bochs",
    "criu",
    "generations [VARIANT [VERSION]]",
    "guest [SERIES...]",
    "handover",
    "linux-source VERSION",
    "postgresql",
    "root SUITE [PACKAGE,...]",
];

impl From<stillpoint_host::Error> for Unavailable {
    fn from(error: stillpoint_host::Error) -> Self {
        Unavailable::Missing(error.to_string())
    }
}

/// Returns the cache of this process.
///
/// # Errors
/// The directory of the cache cannot be used.
pub fn cache() -> Result<&'static Cache, String> {
    static CACHE: OnceLock<Result<Cache, String>> = OnceLock::new();
    CACHE.get_or_init(|| Cache::open().map_err(|error| error.to_string())).as_ref().map_err(Clone::clone)
}

/// Returns the entry `kind/name-HASH`, with the hash of `inputs`; `make` fills an empty directory that is renamed
/// afterwards.
///
/// # Errors
/// The directory of the cache cannot be used, or `make` fails.
pub fn entry(
    kind: &str,
    name: &str,
    inputs: &[Vec<u8>],
    make: impl FnOnce(&Path) -> Result<(), Unavailable>,
) -> Result<PathBuf, Unavailable> {
    let name = format!("{name}-{}", cache::key(inputs.iter().map(Vec::as_slice)));
    cache()?.entry(&EntryName::new(kind, &name), make)
}

/// Returns the directory `kind/name`, which its users fill by a protocol of their own.
///
/// # Errors
/// The directory of the cache cannot be used.
pub fn directory(kind: &str, name: &str) -> Result<PathBuf, String> {
    cache()?.directory(kind, name).map_err(|error| error.to_string())
}

/// Makes or finds the entry that `words` name: one of [`NAMES`], and its arguments.
///
/// # Errors
/// The words name no entry, or the entry cannot be made.
pub fn path(words: &[String]) -> Result<PathBuf, Unavailable> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["bochs"] => bochs(),
        ["criu"] => criu(),
        ["generations"] => generations("", "6.12"),
        ["generations", variant] => generations(variant, "6.12"),
        ["generations", variant, version] => generations(variant, version),
        ["guest", ref series @ ..] => guest(series),
        ["handover"] => handover(),
        ["linux-source", version] => linux_source(version),
        ["postgresql"] => postgresql(),
        ["root", suite] => root(suite, ""),
        ["root", suite, packages] => root(suite, packages),
        _ => Err(format!("{:?} is none of: {}", words.join(" "), NAMES.join(", ")).into()),
    }
}

/// Makes criu 4: `criu` in the directory runs it.
///
/// # Errors
/// The entry cannot be made.
pub fn criu() -> Result<PathBuf, Unavailable> {
    let suite = std::env::var("STILLPOINT_CRIU_SUITE").unwrap_or_default();
    Script { name: "criu", files: &["setup/archive"], words: &[&suite], compilers: &[] }.entry(&[])
}

/// Makes the emulated machine, with the newest of Debian's kernels of each of `series` too.
///
/// # Errors
/// The entry cannot be made.
pub fn guest(series: &[&str]) -> Result<PathBuf, Unavailable> {
    let script = Script { name: "guest", files: &["setup/archive", "setup/criu"], words: series, compilers: &[] };
    script.entry_with(|| {
        let criu = criu()?.into_os_string();
        Ok(std::iter::once(criu).chain(series.iter().map(OsString::from)).collect())
    })
}

/// Makes Debian's source of Linux `version`, in `source`.
///
/// # Errors
/// The entry cannot be made.
pub fn linux_source(version: &str) -> Result<PathBuf, Unavailable> {
    let files = &["setup/archive", "setup/linux-source.sh"];
    Script { name: "linux-source", files, words: &[version], compilers: &[] }.entry(&[version.into()])
}

/// Makes kernels that hand memory over to each other.
///
/// # Errors
/// The entry cannot be made.
pub fn handover() -> Result<PathBuf, Unavailable> {
    let files = &["setup/archive", "setup/linux-source", "setup/linux-source.sh", "crates/kernel/tests/kernel"];
    let script = Script { name: "handover", files, words: &[], compilers: &["gcc"] };
    script.entry_with(|| Ok(vec![linux_source("7.2")?.into()]))
}

/// Makes a kernel with address-space generations and its tests; `variant` may be empty.
///
/// # Errors
/// The entry cannot be made.
pub fn generations(variant: &str, version: &str) -> Result<PathBuf, Unavailable> {
    let mut files = vec!["setup/archive", "setup/linux-source", "setup/linux-source.sh"];
    files.extend(["crates/patch/generations/kernel", "crates/patch/generations/tests"]);
    let makefile = workspace_root().join("crates/patch/generations/tests/Makefile");
    let makefile = fs::read_to_string(&makefile).map_err(|error| format!("read {}: {error}", makefile.display()))?;
    let outside: Vec<String> = makefile
        .split_whitespace()
        .filter(|word| word.starts_with("../../"))
        .map(|word| format!("crates/patch/generations/tests/{word}"))
        .collect();
    files.extend(outside.iter().map(String::as_str));
    let script = Script { name: "generations", files: &files, words: &[variant, version], compilers: &["gcc"] };
    script.entry_with(|| Ok(vec![linux_source(version)?.into(), variant.into(), version.into()]))
}

/// Makes Bochs, a machine whose processor has PCID.
///
/// # Errors
/// The entry cannot be made.
pub fn bochs() -> Result<PathBuf, Unavailable> {
    let files = &["setup/archive", "crates/patch/generations/machine/bochs.edits"];
    Script { name: "bochs", files, words: &[], compilers: &["g++"] }.entry(&[])
}

/// Makes PostgreSQL 17, in `root`.
///
/// # Errors
/// The entry cannot be made.
pub fn postgresql() -> Result<PathBuf, Unavailable> {
    Script { name: "postgresql", files: &["setup/archive"], words: &[], compilers: &[] }.entry(&[])
}

/// Makes a fresh Debian of a suite, in `root`, with further packages; their names have commas between them.
///
/// # Errors
/// The entry cannot be made.
pub fn root(suite: &str, packages: &str) -> Result<PathBuf, Unavailable> {
    Script { name: "root", files: &["setup/archive"], words: &[suite, packages], compilers: &[] }
        .entry(&[suite.into(), packages.into()])
}

/// Makes libstillpoint of this tree, shared and static.
///
/// # Errors
/// The entry cannot be made.
pub fn libstillpoint() -> Result<PathBuf, Unavailable> {
    let runtime = workspace_root().join("crates/patch/runtime");
    let mut inputs = vec![version("gcc")?];
    for part in ["Makefile", "include", "runtime.map", "src"] {
        inputs.push(contents(&runtime.join(part))?);
    }
    entry("built", "libstillpoint", &inputs, |into| {
        let build = format!("BUILD={}", into.display());
        run(Command::new("make").args(["--silent", "-C"]).arg(&runtime).arg(build))
    })
}

/// Makes PostgreSQL's own regression tests of one version of Debian's package; the script `fetch DIR VERSION` downloads
/// them.
///
/// # Errors
/// The entry cannot be made.
pub fn postgres_regress(fetch: &Path, package_version: &str) -> Result<PathBuf, Unavailable> {
    let inputs = [read(fetch)?, package_version.as_bytes().to_vec(), version("gcc")?];
    // the script names its own directory at the end
    let made = entry("setup", "postgres-regress", &inputs, |into| {
        run(Command::new(fetch).arg(into.join("tests")).arg(package_version))
    });
    made.map(|entry| entry.join("tests"))
}

/// Commit whose binary made what later versions must still read: patched processes, migrations, images. Raise it when a
/// format's version rises, after the tests have shown that the version before is read or refused.
const EARLIER_VERSION: &str = "b7a8496db89a51abdd1df6ed3a106c3b01424098";

/// Makes the `stillpoint` of an earlier version, from this repository's history.
///
/// # Errors
/// The entry cannot be made.
pub fn earlier_version() -> Result<PathBuf, Unavailable> {
    let inputs = [EARLIER_VERSION.as_bytes().to_vec(), version("rustc")?];
    let made = entry("built", "stillpoint", &inputs, |into| {
        let (source, target) = (into.join("source"), into.join("target"));
        let script = "mkdir \"$1\" && git archive \"$3\" | tar -x -C \"$1\" && cd \"$1\" && \
                      cargo build --quiet --locked -p stillpoint --bin stillpoint --target-dir \"$2\" && \
                      cp \"$2/debug/stillpoint\" .. && cd .. && rm -r \"$1\" \"$2\"";
        let mut command = Command::new("sh");
        command.args(["-ec", script, "sh"]).arg(source).arg(target).arg(EARLIER_VERSION);
        run(command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "0"))
    });
    made.map(|entry| entry.join("stillpoint"))
}

/// A script of `setup/`, called with an empty directory and further arguments.
struct Script<'a> {
    name: &'a str,
    /// Files and directories of the tree that it reads besides itself.
    files: &'a [&'a str],
    /// Arguments that decide what it makes.
    words: &'a [&'a str],
    compilers: &'a [&'a str],
}

impl Script<'_> {
    fn entry(&self, arguments: &[OsString]) -> Result<PathBuf, Unavailable> {
        self.entry_with(|| Ok(arguments.to_vec()))
    }

    /// Makes or finds the entry; `arguments` is called only if it is made.
    fn entry_with(
        &self,
        arguments: impl FnOnce() -> Result<Vec<OsString>, Unavailable>,
    ) -> Result<PathBuf, Unavailable> {
        let root = workspace_root();
        let script = root.join("setup").join(self.name);
        let mut inputs = vec![read(&script)?];
        for file in self.files {
            inputs.push(contents(&root.join(file))?);
        }
        inputs.extend(self.words.iter().map(|word| word.as_bytes().to_vec()));
        for compiler in self.compilers {
            inputs.push(version(compiler)?);
        }
        entry("setup", self.name, &inputs, |into| run(Command::new(&script).arg(into).args(arguments()?)))
    }
}

/// Runs a maker, in the tree if it names no directory; the reason of a failure is the last line that it printed, and
/// its exit code gives the kind.
///
/// # Errors
/// The command does not start, or fails.
pub fn run(command: &mut Command) -> Result<(), Unavailable> {
    if command.get_current_dir().is_none() {
        command.current_dir(workspace_root());
    }
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("run {:?}: {error}", command.get_program()))?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed no error");
    let name = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy();
    Err(Unavailable::of_code(output.status.code(), format!("{name} ended with {}: {last}", output.status)))
}

/// Returns the answer of a compiler to `--version`.
///
/// # Errors
/// The compiler does not run.
pub fn version(compiler: &str) -> Result<Vec<u8>, String> {
    let output = Command::new(compiler).arg("--version").output();
    output.map(|output| output.stdout).map_err(|error| format!("run {compiler} (try `make setup`): {error}"))
}

/// Returns the contents of a file, or names and contents of the files below a directory.
///
/// # Errors
/// The file or a file below the directory cannot be read.
pub fn contents(path: &Path) -> Result<Vec<u8>, String> {
    if !path.is_dir() {
        return read(path);
    }
    let listed = fs::read_dir(path).map_err(|error| format!("list {}: {error}", path.display()))?;
    let mut names: Vec<OsString> = listed.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    let mut parts = Vec::new();
    for name in names {
        parts.push(name.as_encoded_bytes().to_vec());
        parts.push(contents(&path.join(&name))?);
    }
    Ok(cache::digest(parts.iter().map(Vec::as_slice)).to_vec())
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_of_a_directory_are_names_and_bytes() {
        let of = |files: &[(&str, &str)]| {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
                fs::write(dir.path().join(name), text).unwrap();
            }
            contents(dir.path()).unwrap()
        };
        let one = of(&[("a", "1"), ("d/b", "2")]);
        assert_eq!(one, of(&[("d/b", "2"), ("a", "1")]), "at another place, in another order");
        for other in [&[("a", "1"), ("d/b", "3")][..], &[("a", "1"), ("d/c", "2")], &[("a", "1")]] {
            assert_ne!(one, of(other));
        }
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        let error = path(&["cirus".to_owned()]).unwrap_err();
        assert!(error.text().contains("\"cirus\" is none of: bochs, criu"), "{error}");
    }
}
