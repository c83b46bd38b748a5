//! Installed files: the binary on older and newer systems, and Debian's packages from their first installation to their purge.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_testing::{Unavailable, recipes, skip, workspace_root};
use tempfile::TempDir;

/// Version of the packages that are upgraded.
const BEFORE: &str = "0.0.9-1";

/// Runs a command that must succeed, and returns what it printed.
#[track_caller]
fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("run {command:?}: {error}"));
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
    stdout
}

fn make(words: &[&str]) -> Command {
    let mut command = Command::new("make");
    command.current_dir(workspace_root()).args(words).env_remove("RUSTFLAGS").env_remove("MAKEFLAGS");
    command
}

/// Builds the packages, and moves them into `to`.
fn packages(to: &Path, version: Option<&str>) {
    let version = version.map(|version| format!("DEB_VERSION={version}"));
    let printed = succeed(make(&["deb"]).args(version));
    fs::create_dir(to).unwrap();
    let directory = Path::new(printed.lines().last().expect("paths of packages")).parent().unwrap();
    for file in fs::read_dir(directory).unwrap().flatten().filter(|file| file.path().is_file()) {
        fs::rename(file.path(), to.join(file.file_name())).unwrap();
    }
}

/// Names of the packages in a directory, without versions.
fn names(directory: &Path) -> Vec<String> {
    let files = fs::read_dir(directory).unwrap().flatten().map(|file| file.file_name().into_string().unwrap());
    let mut names: Vec<String> =
        files.filter(|name| name.ends_with(".deb")).map(|name| name.split('_').next().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// Runs `packages.sh` with these words in a root that keeps none of its changes.
#[track_caller]
fn in_root(root: &Path, packages: &Path, words: &[&str]) -> String {
    // An overlay in memory, as for the container: what is below may be an overlay itself.
    const ENTER: &str = r#"
        ip link set lo up
        mount -t tmpfs tmpfs "$2"
        mkdir "$2/upper" "$2/work" "$2/root"
        mount -t overlay -o lowerdir="$1",upperdir="$2/upper",workdir="$2/work" overlay "$2/root"
        mount -t proc proc "$2/root/proc"
        mount --rbind /dev "$2/root/dev"
        mkdir "$2/root/packages"
        mount --bind "$3" "$2/root/packages"
        root=$2/root
        shift 3
        exec chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive LC_ALL=C "$@""#;
    let at = TempDir::with_prefix("stillpoint-root-").unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--", "sh", "-ec", ENTER, "enter"]);
    command.args([root, at.path(), packages]).args(["sh", "/packages/packages.sh"]).args(words);
    succeed(&mut command)
}

/// Checks that it is a stripped position-independent program that needs no library, is read-only after its relocation, and runs nothing
/// before its C library.
#[track_caller]
fn is_hardened(program: &Path) {
    let shown = succeed(Command::new("readelf").args(["--wide", "-hldS"]).arg(program));
    let has = |word: &str| shown.contains(word);
    assert!(has("DYN (Position-Independent Executable file)") && has("GNU_RELRO") && has("BIND_NOW"), "{shown}");
    let stack = shown.lines().find(|line| line.contains("GNU_STACK")).expect("a line for the stack");
    assert!(!stack.contains("RWE"), "{stack}");
    for absent in ["NEEDED", "INTERP", ".symtab", ".debug_line", ".preinit_array", "TEXTREL"] {
        assert!(!has(absent), "{absent}: {shown}");
    }
}

/// Roots with what they are for: `run` starts the program, `install` does all that is done to packages.
fn roots() -> Result<[(PathBuf, &'static str); 3], Unavailable> {
    let root = |suite, packages| recipes::root(suite, packages).map(|entry| entry.join("root"));
    Ok([
        (root("bullseye", "")?, "run"),
        (root("bookworm", "systemd,bash-completion")?, "install"),
        (root("trixie", "systemd,bash-completion")?, "install"),
    ])
}

#[test]
#[ignore = "full tier: builds what is installed (four minutes), and makes fresh roots of three releases"]
fn packages_are_installed_upgraded_and_purged() {
    if !rustix::process::geteuid().is_root() {
        skip!("other roots need root");
    }
    if Command::new("lintian").arg("--version").output().is_err() {
        skip!("lintian is not installed: run setup/install full");
    }
    let roots = match roots() {
        Ok(roots) => roots,
        Err(why) => skip!(why),
    };
    let dir = TempDir::with_prefix("stillpoint-packages-").unwrap();
    let (old, new, installed) = (dir.path().join("old"), dir.path().join("new"), dir.path().join("installed"));
    packages(&old, Some(BEFORE));
    packages(&new, None);
    assert_eq!(names(&new), ["libstillpoint-dev", "libstillpoint1", "stillpoint", "stillpoint-dbgsym"]);
    let changes = fs::read_dir(&new).unwrap().flatten().map(|file| file.path());
    let changes = changes.filter(|path| path.extension().is_some_and(|end| end == "changes"));
    succeed(Command::new("lintian").args(["--allow-root", "--fail-on", "error,warning"]).args(changes));

    let destination = format!("DESTDIR={}", installed.display());
    succeed(&mut make(&["install", &destination]));
    let program = installed.join("usr/local/bin/stillpoint");
    is_hardened(&program);
    let symbols = installed.join("usr/local/bin/.debug/stillpoint.debug");
    let shown = succeed(Command::new("readelf").args(["--wide", "-S"]).arg(&symbols));
    assert!(shown.contains(".debug_line"), "{shown}");
    fs::copy(&program, dir.path().join("stillpoint")).unwrap();
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/packages.sh"), dir.path().join("packages.sh"))
        .unwrap();
    for (root, what) in roots {
        in_root(&root, dir.path(), &[what, BEFORE]);
    }

    succeed(&mut make(&["uninstall", &destination]));
    let left = succeed(Command::new("find").arg(&installed).args(["!", "-type", "d", "-printf", "/%P\\n"]));
    let mut left: Vec<&str> = left.lines().collect();
    left.sort_unstable();
    assert_eq!(left, ["/etc/default/stillpoint", "/etc/stillpoint/kernel.toml"]);
}
