//! A mariadbd built from the same source with the quiescence points of `crates/patch/integrations/mariadb`, once, and
//! cached.
//!
//! The tree and all objects are in the cache: when an edit changes, only the units that it affects are compiled again.
//! Parts that the tests do not need are left out (plugins, engines, the client programs).

use super::{PackagedServer, packaged};
use crate::Unavailable;
use crate::annotation::libstillpoint;
use crate::cli::{Run, Stillpoint};
use crate::packages::Binary;
use crate::server::bound_command;
use crate::workspace_root;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use stillpoint_host::cache;
use stillpoint_integrations::{Edits, Integration};
use stillpoint_testing::recipes;

/// The server with quiescence points.
#[derive(Debug, Clone)]
pub struct Annotated {
    /// Debian's package: its messages and system tables are used to start this server.
    pub packaged: PackagedServer,
    tree: PathBuf,
    build: PathBuf,
}

/// Parts of the source tree that no build of ours reads: they exist by name only.
const BY_NAME: [&str; 2] = ["mysql-test", "sql-bench"];
/// Parts that are left out.
const LEFT_OUT: [&str; 8] = [
    "debian",
    "randgen",
    "storage/columnstore",
    "storage/connect",
    "storage/mroonga",
    "storage/rocksdb",
    "storage/spider",
    "storage/tokudb",
];
/// Plugins and engines that the server does not have.
const WITHOUT: &str = "\
    PERFSCHEMA ARCHIVE BLACKHOLE CSV EXAMPLE FEDERATED FEDERATEDX SPHINX OQGRAPH TEST_SQL_DISCOVERY AUDIT_NULL \
    AUTH_PAM AUTH_GSSAPI AUTH_ED25519 AUTH_EXAMPLES AUTH_SOCKET AUTH_0X0100 AUTH_TEST_PLUGIN QA_AUTH_CLIENT \
    QA_AUTH_INTERFACE QA_AUTH_SERVER FEEDBACK FILE_KEY_MANAGEMENT AWS_KEY_MANAGEMENT HASHICORP_KEY_MANAGEMENT \
    DEBUG_KEY_MANAGEMENT EXAMPLE_KEY_MANAGEMENT CRACKLIB_PASSWORD_CHECK PASSWORD_REUSE_CHECK SIMPLE_PASSWORD_CHECK \
    DISKS HANDLERSOCKET LOCALES METADATA_LOCK_INFO QC_INFO QUERY_CACHE_INFO QUERY_RESPONSE_TIME SERVER_AUDIT \
    SQL_ERRLOG TYPE_MYSQL_JSON TYPE_MYSQL_TIMESTAMP TYPE_TEST USER_VARIABLES USERSTAT VERSIONING WSREP_INFO \
    PROVIDER_BZIP2 PROVIDER_LZ4 PROVIDER_LZMA PROVIDER_LZO PROVIDER_SNAPPY DAEMON_EXAMPLE FTEXAMPLE FUNC_TEST \
    TEST_SQL_SERVICE S3";
/// Options of Debian's build, without debugging information: the builder of patches makes its own.
const OPTIONS: [&str; 20] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_C_FLAGS_RELEASE=-O2 -DNDEBUG",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG",
    "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
    "-DWITH_UNIT_TESTS=OFF",
    "-DWITH_WSREP=OFF",
    "-DWITH_EMBEDDED_SERVER=OFF",
    "-DWITH_SSL=system",
    "-DWITH_ZLIB=system",
    "-DWITH_PCRE=system",
    "-DWITH_LIBFMT=system",
    "-DWITH_NUMA=OFF",
    "-DWITH_SYSTEMD=no",
    "-DWITH_MARIABACKUP=OFF",
    "-DSECURITY_HARDENED=OFF",
    "-DMYSQL_MAINTAINER_MODE=OFF",
    "-DCONC_WITH_UNIT_TESTS=OFF",
    "-DCONC_WITH_CURL=OFF",
    "-DCMAKE_DISABLE_FIND_PACKAGE_URING=ON",
    "-DCMAKE_DISABLE_FIND_PACKAGE_LIBAIO=ON",
];

/// Builds it unless that is done; once for each process. An error means that the archive does not offer the source.
///
/// # Errors
/// The package or its source cannot be fetched, or libstillpoint cannot be built.
pub fn annotated() -> &'static Result<Annotated, Unavailable> {
    static ANNOTATED: OnceLock<Result<Annotated, Unavailable>> = OnceLock::new();
    ANNOTATED.get_or_init(|| {
        let packaged = packaged().clone()?;
        let library = libstillpoint()?;
        Ok(made(packaged, library))
    })
}

/// Builds the server; the test fails if the sources of the archive do not build.
fn made(mut packaged: PackagedServer, library: &Path) -> Annotated {
    let name = format!("annotated_{}", packaged.version.replace(':', "%3a"));
    let shelf = recipes::directory("mariadb", &name).unwrap_or_else(|why| panic!("{why}"));
    let lock = std::fs::File::create(shelf.join("lock")).expect("make a lock");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("lock the build");
    // Compile commands have real paths, without links to the cache: another link makes no other build.
    let shelf = shelf.canonicalize().expect("the directory is there");
    let library = &library.canonicalize().expect("the library is there");
    let build = shelf.join("build");
    let integration = Integration::read(&workspace_root().join("crates/patch/integrations/mariadb"))
        .unwrap_or_else(|e| panic!("{e}"));
    let tree = shelf.join("tree");
    // A sealed tree that is incomplete was damaged since; one without a seal was interrupted, and ninja knows the
    // completed part.
    let sealed = [&tree, &build].map(|dir| (dir.with_extension("seal").exists(), cache::is_sealed(dir)));
    if sealed.contains(&(true, false)) {
        for dir in [&tree, &build] {
            cache::remove(dir).unwrap_or_else(|e| panic!("{e}"));
        }
    }
    for dir in [&tree, &build] {
        cache::unseal(dir).unwrap_or_else(|e| panic!("{e}"));
    }
    if !tree.exists() {
        let half = shelf.join("tree.half");
        let _ = std::fs::remove_dir_all(&half);
        copy(&packaged.source, &half);
        std::fs::rename(&half, &tree).expect("name the tree");
    }
    let tree = tree.canonicalize().expect("the tree is there");
    integration.apply(&packaged.source, &tree).unwrap_or_else(|e| panic!("{e}"));
    configure(&tree, &build, library);
    run(bound_command("ninja".as_ref()).arg("-C").arg(&build).arg("mariadbd"));
    for dir in [&tree, &build] {
        cache::seal(dir, &[]).unwrap_or_else(|e| panic!("{e}"));
    }
    packaged.binary = Binary { path: build.join("sql/mariadbd"), libraries: vec![library.to_owned()] };
    Annotated { packaged, tree, build }
}

/// Copies the needed part of the source tree.
fn copy(source: &Path, tree: &Path) {
    std::fs::create_dir_all(tree).expect("make the tree");
    let list = |dir: &Path| std::fs::read_dir(dir).expect("list the source").map(|e| e.expect("an entry").file_name());
    let below = list(&source.join("storage")).map(|name| Path::new("storage").join(name));
    let top = list(source).map(PathBuf::from).filter(|name| name != Path::new("storage"));
    std::fs::create_dir(tree.join("storage")).expect("make a directory");
    for name in top.chain(below) {
        if BY_NAME.iter().any(|by_name| name == Path::new(by_name)) {
            std::os::unix::fs::symlink(source.join(&name), tree.join(&name)).expect("link to the source");
        } else if !LEFT_OUT.iter().any(|left_out| name == Path::new(left_out)) {
            run(Command::new("cp").arg("-a").args([source.join(&name), tree.join(&name)]));
        }
    }
}

fn configure(tree: &Path, build: &Path, library: &Path) {
    std::fs::create_dir_all(build).expect("make a directory");
    let mut cmake = Command::new("cmake");
    cmake.args(["-G", "Ninja", "-S"]).arg(tree).arg("-B").arg(build).args(OPTIONS);
    cmake.args(WITHOUT.split_whitespace().map(|name| format!("-DPLUGIN_{name}=NO")));
    cmake.arg(format!("-DSTILLPOINT_LIBRARY={}", library.join("libstillpoint.so").display()));
    let wanted = format!("{cmake:?}");
    let record = build.join("stillpoint-configured");
    if std::fs::read_to_string(&record).is_ok_and(|done| done == wanted) {
        return;
    }
    run(&mut cmake);
    std::fs::write(&record, wanted).expect("record the configuration");
}

#[track_caller]
fn run(command: &mut Command) {
    let out = command.output().unwrap_or_else(|e| panic!("run {:?} (try `make setup`): {e}", command.get_program()));
    let text = String::from_utf8_lossy(&out.stdout);
    let tail: Vec<&str> = text.lines().rev().take(40).collect();
    let errors = String::from_utf8_lossy(&out.stderr);
    let tail: String = tail.into_iter().rev().flat_map(|line| [line, "\n"]).collect();
    assert!(out.status.success(), "{command:?} ended with {}:\n{tail}\n{errors}", out.status);
}

impl Annotated {
    /// Makes the server with the first of these edits, with the first two, and so on, each of one unit, for restarts.
    /// Compiled and linked outside of the build, into `dir`.
    #[track_caller]
    pub fn rebuilt(&self, edits: &[String], dir: &Path) -> Vec<Binary> {
        let commands = std::fs::read(self.build.join("compile_commands.json")).expect("read the compile commands");
        let commands: Vec<serde_json::Value> = serde_json::from_slice(&commands).expect("compile commands are JSON");
        let link = Command::new("ninja").arg("-C").arg(&self.build).args(["-t", "commands", "mariadbd"]).output();
        let link = String::from_utf8(link.expect("run ninja").stdout).expect("commands are text");
        let (before, behind) =
            link.lines().find_map(|line| line.split_once(" -o sql/mariadbd ")).expect("the server is linked");
        let mut objects = String::new();
        let mut programs = Vec::new();
        for (at, edits) in edits.iter().enumerate() {
            let parsed = Edits::parse("the experiment", edits).unwrap_or_else(|e| panic!("{e}"));
            let (file, edit) = parsed.files().next().expect("edits of one file");
            let shipped = self.tree.join(file);
            let text = std::fs::read_to_string(&shipped).unwrap_or_else(|e| panic!("read {}: {e}", shipped.display()));
            let edited = dir.join(shipped.file_name().expect("a unit has a name"));
            std::fs::write(&edited, edit.apply(file, &text).unwrap_or_else(|e| panic!("{e}"))).expect("write the unit");
            let object = edited.with_extension("o");
            let command = commands.iter().find(|command| command["file"].as_str().map(Path::new) == Some(&shipped));
            let command = command.and_then(|command| command["command"].as_str()).expect("the unit is compiled");
            let (options, _) = command.split_once(" -o ").expect("the command names its output");
            let beside = shipped.parent().expect("a unit lies somewhere").display();
            let line = format!("{options} -iquote {beside} -o {} -c {}", object.display(), edited.display());
            run(Command::new("sh").args(["-c", &line]).current_dir(&self.build));
            // An object before the libraries takes precedence over theirs.
            objects += &format!(" {}", object.display());
            let path = dir.join(format!("mariadbd-{}", at + 1));
            let line = format!("{before}{objects} -o {} {behind}", path.display());
            run(Command::new("sh").args(["-c", &line]).current_dir(&self.build));
            programs.push(Binary { path, libraries: self.packaged.binary.libraries.clone() });
        }
        programs
    }

    /// Builds a patch of one unit from edits to it, with the name of its file.
    pub fn patch(&self, edits: &str, output: &Path) -> Run {
        let parsed = Edits::parse("the test", edits).unwrap_or_else(|e| panic!("{e}"));
        let (file, edit) = parsed.files().next().expect("edits of one file");
        let shipped = self.tree.join(file);
        let text = std::fs::read_to_string(&shipped).unwrap_or_else(|e| panic!("read {}: {e}", shipped.display()));
        let dir = tempfile::tempdir().expect("make a directory");
        let edited = dir.path().join("edited");
        std::fs::write(&edited, edit.apply(file, &text).unwrap_or_else(|e| panic!("{e}")))
            .expect("write the edited unit");
        let labels = ["a", "b"].map(|side| format!("--label={side}/{file}"));
        let diff = Command::new("diff").arg("-u").args(labels).args([&shipped, &edited]).output().expect("run diff");
        let name = output.file_stem().expect("the patch has a name");
        let change = dir.path().join(name).with_extension("diff");
        std::fs::write(&change, diff.stdout).expect("write the diff");
        let build = Stillpoint::new().args(["patch", "build", "--source"]).arg(&self.tree).arg("--compile-commands");
        let build = build.arg(self.build.join("compile_commands.json")).arg("--unit-filter").arg(file);
        let build = build.arg("--target").arg(&self.packaged.binary.path).arg("--diff").arg(change);
        build.arg("--output").arg(output).run()
    }
}
