//! Upstream fixes that Debian 11's security team took into its PostgreSQL 13.23, one by one, into a running cluster.

use super::{functions, why};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_e2e::cli::Stillpoint;
use stillpoint_e2e::packages::Binary;
use stillpoint_e2e::postgres::{Bench, Cluster, Postgres, builder_cache};
use tempfile::TempDir;

const PACKAGE: &str = "postgresql-13";
/// The source is Debian 11's, the compiler and the libraries are this system's.
const FROM: [&str; 4] = ["--release", "bullseye", "--root-of", "bookworm"];
/// Libraries that the postmaster loads, so that every process has them.
const PRELOADED: &str =
    "shared_preload_libraries=plpgsql,pgcrypto,ltree,_int,pg_trgm,refint,unaccent,dict_xsyn,btree_gist,dblink";

/// What is in force in one executable or library.
#[derive(Default)]
struct Chain {
    /// Diffs, all of them.
    diffs: Vec<String>,
    /// Patch files.
    patches: Vec<PathBuf>,
    /// Diffs that make no difference alone; they come with the next.
    pending: Vec<String>,
}

/// What came of one fix in one target.
enum Fate {
    Applied(usize),
    BuiltOnly(usize),
    Nothing,
    Not(String),
}

pub(crate) fn run() -> Result<(), String> {
    let series = series()?;
    let fixes: Vec<String> = series.iter().filter(|name| is_fix(name)).cloned().collect();
    let shipped = format!("without:{}", fixes.join(","));
    let dir = TempDir::with_prefix("stillpoint-postgres-fixes-").map_err(|e| e.to_string())?;
    let target = builder("target").args(["--shipped", &shipped, "--program", "postgres", "-o"]).arg(dir.path());
    let made = target.run();
    if made.code != Some(0) {
        return Err(made.to_string());
    }
    let postgres = installed(dir.path())?;
    let mut cluster = Cluster::start(&postgres, &[PRELOADED]);
    Bench::prepare(&cluster, 1);
    let bench = Bench::start(&cluster, 2, &[]);
    println!(
        "{PACKAGE}, without its {} upstream fixes, built by its own rules with this system's compiler\n",
        fixes.len()
    );
    println!("| fix | target: functions | why not |");
    println!("|---|---|---|");
    let mut chains: BTreeMap<String, Chain> = BTreeMap::new();
    let (mut code, mut applied, mut built) = (0, 0, 0);
    for fix in &fixes {
        let targets = targets(fix)?;
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        let mut live = !targets.is_empty();
        for target in &targets {
            let chain = chains.entry(target.clone()).or_default();
            match one(&cluster, &shipped, fix, target, chain, dir.path()) {
                Fate::Applied(functions) => good.push(format!("{target}: {functions}")),
                Fate::BuiltOnly(functions) => {
                    good.push(format!("{target}: {functions} (built; no process runs it)"));
                }
                Fate::Nothing => good.push(format!("{target}: no code of its own, comes with the next")),
                Fate::Not(reason) => {
                    live = false;
                    bad.push(format!("{target}: {reason}"));
                }
            }
        }
        code += usize::from(!targets.is_empty());
        applied += usize::from(live);
        built += usize::from(!good.is_empty());
        let bad = if targets.is_empty() { "changes no code of the server".to_owned() } else { bad.join("; ") };
        println!("| {} | {} | {bad} |", fix.trim_end_matches(".patch"), good.join("; "));
        cluster.assert_unharmed();
    }
    println!("\n{code} fixes change code; {applied} are wholly in force, {built} at least in part");
    println!("{} transactions of pgbench meanwhile, none failed", bench.assert_clean());
    let revert = Stillpoint::new().args(["patch", "revert", "--all", "--exe"]).arg(cluster.executable()).run();
    cluster.assert_unharmed();
    println!("{}", if revert.code == Some(0) { "all taken back again" } else { revert.stderr.as_str() });
    Ok(())
}

fn builder(command: &str) -> Stillpoint {
    Stillpoint::new().args(["patch", command, "--debian", PACKAGE, "--json", "--cache"]).arg(builder_cache()).args(FROM)
}

fn series() -> Result<Vec<String>, String> {
    let run = builder("target").run();
    let line = run.json().into_iter().find_map(|line| line["series"].as_array().cloned());
    let entries = line.filter(|_| run.code == Some(0)).ok_or_else(|| run.to_string())?;
    Ok(entries.iter().filter_map(|entry| entry["name"].as_str().map(str::to_owned)).collect())
}

/// The fixes are numbered with four digits, what Debian itself changes is not.
fn is_fix(name: &str) -> bool {
    name.len() > 5 && name.as_bytes()[..4].iter().all(u8::is_ascii_digit) && name.as_bytes()[4] == b'-'
}

/// The tree of the package, as `patch target` left it.
fn entry(kind: &str, prefix: &str) -> Result<PathBuf, String> {
    let directory = builder_cache().join(kind);
    let entries = std::fs::read_dir(&directory).map_err(|e| format!("{}: {e}", directory.display()))?.flatten();
    let fits = |path: &PathBuf| {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        name.starts_with(prefix) && !name.contains(".half")
    };
    let newest = entries.map(|e| e.path()).filter(fits).max_by_key(|p| p.metadata().and_then(|m| m.modified()).ok());
    newest.ok_or_else(|| format!("{} has no {prefix}", directory.display()))
}

/// Installs what was built below `into`, in the clean root where its paths are right.
fn installed(into: &Path) -> Result<Postgres, String> {
    let root = entry("root", &format!("{PACKAGE}-foreign-"))?;
    let tree = entry("built", &format!("bookworm-{PACKAGE}_"))?.join("tree");
    let out = into.join("installed");
    std::fs::create_dir_all(&out).map_err(|e| e.to_string())?;
    const SCRIPT: &str = r#"
        at=$(ls -d "$1"/build/reproducible-path/postgresql-13-*) && mount --bind "$2" "$at" || exit 1
        mount --bind "$3" "$1/stillpoint/out" || exit 1
        exec chroot "$1" /bin/sh -c 'cd /build/reproducible-path/*-13-* || exit 1; export MAKELEVEL=0
            for part in src contrib; do
                make -s -C build/$part install CLANG=/bin/true XSLTPROC=/bin/true DESTDIR=/stillpoint/out || exit 1
            done'"#;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "--", "/bin/sh", "-c", SCRIPT, "sh"])
        .args([&root, &tree, &out]);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    let done = command.output().map_err(|e| e.to_string())?;
    if !done.status.success() {
        return Err(format!("installing: {}", String::from_utf8_lossy(&done.stderr)));
    }
    Command::new("chmod").args(["-R", "a+rX"]).arg(into).status().map_err(|e| e.to_string())?;
    let path = out.join("usr/lib/postgresql/13/bin/postgres");
    let binary = Binary { path, libraries: vec![out.join("usr/lib/x86_64-linux-gnu")] };
    Ok(Postgres { binary, version: "13.23".into() })
}

/// Executables and libraries that have code of the files which a fix changes.
fn targets(fix: &str) -> Result<Vec<String>, String> {
    let path = entry("source", &format!("{PACKAGE}_"))?.join("tree/debian/patches").join(fix);
    let text = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let text = String::from_utf8_lossy(&text);
    let mut targets = Vec::new();
    let changed = text.lines().filter_map(|line| line.strip_prefix("+++ b/"));
    for file in changed.filter(|f| f.ends_with(".c") || f.ends_with(".h")) {
        let mut parts = file.split('/');
        let target = match (parts.next(), parts.next(), parts.next()) {
            (Some("contrib"), Some("intarray"), _) => "_int.so".to_owned(),
            (Some("contrib"), Some("spi"), _) => "refint.so".to_owned(),
            (Some("contrib"), Some(name), _) => format!("{name}.so"),
            (Some("src"), Some("interfaces"), Some("libpq")) => "libpq.so.5.13".to_owned(),
            (Some("src"), Some("bin"), Some(name)) => name.to_owned(),
            (Some("src"), Some("test"), _) => continue,
            (Some("src"), _, _) => "postgres".to_owned(),
            _ => continue,
        };
        if !targets.contains(&target) {
            targets.push(target);
        }
    }
    Ok(targets)
}

fn one(cluster: &Cluster, shipped: &str, fix: &str, target: &str, chain: &mut Chain, dir: &Path) -> Fate {
    let name = format!("{}-{target}", &fix[..4]);
    let output = dir.join(format!("{name}.patch"));
    let mut build =
        builder("build").args(["--shipped", shipped, "--target", target, "--name", &name, "-o"]).arg(&output);
    build = build.arg("--quilt").args(&chain.pending).arg(fix);
    if !chain.patches.is_empty() {
        build = build.arg("--on-top-of").args(&chain.diffs).arg("--earlier").args(&chain.patches);
    }
    let run = build.run();
    if run.code == Some(0) && !output.is_file() {
        chain.pending.push(fix.to_owned());
        return Fate::Nothing;
    }
    if run.code != Some(0) {
        return Fate::Not(why(&run));
    }
    let apply = Stillpoint::new().args(["patch", "apply"]).arg(&output).args(["--timeout", "10s", "--json", "--exe"]);
    let applied = apply.arg(cluster.executable()).run();
    let nobody = applied.stderr.contains("does not map");
    if applied.code != Some(0) && !nobody {
        let _ = Stillpoint::new().args(["patch", "revert", &name, "--exe"]).arg(cluster.executable()).run();
        return Fate::Not(applied.stderr.lines().take(2).collect::<Vec<_>>().join(" "));
    }
    chain.diffs.append(&mut chain.pending);
    chain.diffs.push(fix.to_owned());
    chain.patches.push(output);
    match nobody {
        true => Fate::BuiltOnly(functions(&run)),
        false => Fate::Applied(functions(&run)),
    }
}
