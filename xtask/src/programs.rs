//! Test programs of the tree: built by one call of cargo with one set of features, and divided into units.
//!
//! A unit is what the runner starts, times and lists: all tests in the library or the binary of a crate, or one module of a crate's
//! integration tests; if the module is a folder, each module in it. Each unit is a process of its own, since tests trace, fork and change
//! limits.

use anyhow::{Context, Result, bail};
use cargo_metadata::{Artifact, Message, Package, TargetKind};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

/// Test program that cargo has built.
pub(crate) struct Program {
    package: String,
    package_dir: PathBuf,
    /// `unit`, `unit (NAME)` for the tests in a binary, or the name of the integration tests.
    target: String,
    is_unit: bool,
    executable: PathBuf,
    /// The `stillpoint` binary of the same build.
    stillpoint: PathBuf,
}

/// Tests of one program that run in one process.
#[derive(Clone)]
pub(crate) struct Unit {
    program: Rc<Program>,
    /// Module of the tests; none for all tests of a library or a binary.
    module: Option<String>,
    tests: Vec<String>,
}

impl Unit {
    /// Package, followed by module or target.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.program.package, self.label())
    }

    /// Module, or target if it has no modules.
    pub(crate) fn label(&self) -> &str {
        self.module.as_deref().unwrap_or(&self.program.target)
    }

    /// Package that the tests belong to.
    pub(crate) fn package(&self) -> &str {
        &self.program.package
    }

    /// Returns true if the tests are in the library or the binary itself.
    pub(crate) fn is_unit(&self) -> bool {
        self.program.is_unit
    }

    /// Returns true if `name` is this module, or this target if it has no modules.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.label() == name
    }

    /// Full names of the tests, as libtest lists them, with those of the full tier.
    pub(crate) fn tests(&self) -> &[String] {
        &self.tests
    }

    /// Returns the command that runs the tests of the unit's tier, in the package's directory, as cargo does.
    pub(crate) fn command(&self, root: &Path) -> Command {
        let mut command = self.program.command(root);
        if self.module.is_some() {
            command.arg("--exact").args(&self.tests);
        }
        command
    }

    /// Returns the command that runs one of the tests in its long form, in any tier.
    pub(crate) fn long(&self, root: &Path, test: &str) -> Command {
        let mut command = self.program.command(root);
        command.args(["--exact", test, "--include-ignored", "--nocapture"]).env("STILLPOINT_SOAK", "1");
        command
    }

    /// Command line by which an operator runs the unit.
    pub(crate) fn by_hand(&self) -> String {
        let package = &self.program.package;
        match &self.module {
            _ if self.program.is_unit => format!("cargo test -p {package} --lib --bins"),
            Some(module) => format!("cargo test -p {package} --test {} {module}::", self.program.target),
            None => format!("cargo test -p {package} --test {}", self.program.target),
        }
    }
}

impl Program {
    fn command(&self, root: &Path) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.package_dir).env("CARGO_MANIFEST_DIR", &self.package_dir).env("RUST_BACKTRACE", "1");
        command.env("CARGO_TARGET_DIR", target_dir(root));
        if std::env::var_os("STILLPOINT_BIN").is_none() {
            command.env("STILLPOINT_BIN", &self.stillpoint);
        }
        command
    }

    /// Returns true if the integration tests have this folder of modules.
    fn has_folder(&self, name: &str) -> bool {
        self.package_dir.join("it").join(name).join("mod.rs").is_file()
    }

    /// Divides the program into units, in the order of their modules' names.
    fn units(self, root: &Path) -> Result<Vec<Unit>> {
        let name = format!("{} {}", self.package, self.target);
        let output = self.command(root).args(["--list", "--format", "terse"]).output();
        let output = output.with_context(|| format!("list the tests of {name}"))?;
        if !output.status.success() {
            bail!("{name} does not list its tests ({}):\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let program = Rc::new(self);
        let mut units: Vec<Unit> = Vec::new();
        for test in text.lines().filter_map(|line| line.strip_suffix(": test")) {
            let module = module_of(test, |folder| program.has_folder(folder)).filter(|_| !program.is_unit);
            match units.iter_mut().find(|unit| unit.module.as_deref() == module) {
                Some(unit) => unit.tests.push(test.to_owned()),
                None => units.push(Unit {
                    program: program.clone(),
                    module: module.map(str::to_owned),
                    tests: vec![test.to_owned()],
                }),
            }
        }
        units.sort_by(|a, b| a.module.cmp(&b.module));
        Ok(units)
    }
}

/// First module of a test's full name; if that is a folder, with the module below it.
fn module_of(test: &str, is_folder: impl Fn(&str) -> bool) -> Option<&str> {
    let (first, rest) = test.split_once("::")?;
    let within = rest.split_once("::").filter(|_| is_folder(first));
    Some(&test[..first.len() + within.map_or(0, |(module, _)| "::".len() + module.len())])
}

/// Builds the binaries and the test programs of the whole tree, and returns their units.
///
/// It never selects packages: another selection has other features, and cargo would compile every dependency twice.
///
/// # Errors
/// The tree does not compile, or a test program does not list its tests.
pub(crate) fn build(root: &Path, release: bool) -> Result<Vec<Unit>> {
    let mut command = cargo();
    command.args(["build", "--workspace", "--lib", "--bins", "--tests", "--locked"]);
    command.arg("--message-format=json-render-diagnostics").args(release.then_some("--release"));
    let mut child =
        command.current_dir(root).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("start cargo")?;
    let stdout = child.stdout.take().context("cargo has an output")?;
    let packages = crate::metadata(root)?.packages;
    let stillpoint = target_dir(root).join(if release { "release" } else { "debug" }).join("stillpoint");
    let mut programs = Vec::new();
    for message in Message::parse_stream(BufReader::new(stdout)) {
        if let Message::CompilerArtifact(artifact) = message?
            && artifact.profile.test
        {
            programs.extend(program(&packages, artifact, &stillpoint)?);
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("the tests do not build ({status}); the compiler's messages are above");
    }
    let mut units = Vec::new();
    for program in programs {
        units.extend(program.units(root)?);
    }
    Ok(units)
}

fn program(packages: &[Package], artifact: Artifact, stillpoint: &Path) -> Result<Option<Program>> {
    let Some(executable) = artifact.executable else { return Ok(None) };
    let manifest = artifact.manifest_path.as_std_path();
    let package_dir = manifest.parent().context("a manifest lies in a directory")?.to_owned();
    let is_unit = !artifact.target.kind.contains(&TargetKind::Test);
    let package = packages.iter().find(|package| package.id == artifact.package_id);
    let package = package.context("an artifact belongs to a package")?.name.to_string();
    let is_binary = artifact.target.kind.contains(&TargetKind::Bin);
    let target = match (is_unit, is_binary) {
        (true, true) => format!("unit ({})", artifact.target.name),
        (true, false) => "unit".to_owned(),
        _ => artifact.target.name,
    };
    let executable = executable.into_std_path_buf();
    Ok(Some(Program { package, package_dir, target, is_unit, executable, stillpoint: stillpoint.to_owned() }))
}

/// Returns a command for the cargo that built this program.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Directory into which cargo builds.
pub(crate) fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_a_module_share_its_first_name_and_in_a_folder_two() {
        let module_of = |test| module_of(test, |folder| folder == "engine");
        assert_eq!(module_of("hostile::startup::refuses"), Some("hostile"));
        assert_eq!(module_of("engine::startup::refuses"), Some("engine::startup"));
        assert_eq!(module_of("engine::refuses"), Some("engine"));
        assert_eq!(module_of("refuses"), None);
    }
}
