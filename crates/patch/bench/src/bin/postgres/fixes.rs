//! Upstream fixes that Debian 11's security team added to its PostgreSQL 13.23, applied one by one to a running
//! cluster.

use super::effects;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_patch_bench::build_report::{functions, why};
use stillpoint_patch_tests::cli::{Run as CliRun, Stillpoint, binary};
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::postgres::{Bench, Cluster, Postgres, builder_cache};
use tempfile::TempDir;

const PACKAGE: &str = "postgresql-13";
/// The source is Debian 11's, the compiler and the libraries are this system's.
const FROM: [&str; 4] = ["--release", "bullseye", "--root-of", "bookworm"];
/// Libraries that the postmaster loads, so that every process has them.
const PRELOADED: &str = "shared_preload_libraries=plpgsql,pgcrypto,ltree,_int,pg_trgm,refint,unaccent,dict_xsyn,btree_gist,\
     dblink,hstore,plperl,hstore_plperl,plpython3,hstore_plpython3";

/// Build files that list tests.
const TESTS: [&str; 3] = ["src/test", "contrib/pgcrypto/Makefile", "contrib/pg_trgm/Makefile"];
/// Number of the fix that makes `configure` search for a function, and add a source file of that name where the C
/// library has none. No C library of this system has it.
const CONFIGURED: &str = "0032";
const NOT_CONFIGURED: [&str; 3] = ["configure", "configure.in", "src/include/pg_config.h.in"];
const ADDED: &str = "src/port/timingsafe_bcmp.c";

/// Active fixes in one executable or library.
#[derive(Default)]
struct FixSeries {
    /// All its diffs.
    diffs: Vec<String>,
    /// Patch files.
    patches: Vec<PathBuf>,
    /// Diffs that make no difference alone; they are part of the next patch.
    pending: Vec<String>,
    /// Diffs that were refused.
    refused: Vec<String>,
}

/// Result of one fix in one target.
enum FixResult {
    Applied(usize),
    BuiltOnly(usize),
    Nothing,
    Not(String),
}

/// State that continues from one fix to the next.
struct Run {
    shipped: String,
    /// Directory of patches and other output.
    dir: PathBuf,
    chains: BTreeMap<String, FixSeries>,
    /// Fixes so far that change headers or libraries shared by all programs, and that were not refused.
    shared: Vec<String>,
    /// Source files that a patch adds.
    added: Vec<PathBuf>,
}

/// Numbers of fixes by result.
#[derive(Default)]
struct Counts {
    code: usize,
    applied: usize,
    in_part: usize,
    nothing: usize,
    seen: usize,
}

/// Prints the table. `only_build` leaves the cluster out: the builder's cache keeps results, so an interrupted run
/// continues from there.
pub(crate) fn run(only_build: bool) -> Result<(), String> {
    let series = series()?;
    let fixes: Vec<String> = series.iter().filter(|name| is_fix(name)).cloned().collect();
    let shipped = format!("without:{}", fixes.join(","));
    let dir = TempDir::with_prefix("stillpoint-postgres-fixes-").map_err(|e| e.to_string())?;
    let target = builder("target").args(["--shipped", &shipped, "--program", "postgres", "-o"]).arg(dir.path());
    let made = target.run();
    if made.code != Some(0) {
        return Err(made.to_string());
    }
    let mut live = match only_build {
        true => None,
        false => Some(Live::start(&installed(dir.path())?)?),
    };
    println!(
        "{PACKAGE}, without its {} upstream fixes, built by its own rules with this system's compiler\n",
        fixes.len()
    );
    println!("| fix | target: functions | effect | why not |");
    println!("|---|---|---|---|");
    let (chains, shared, added) = Default::default();
    let mut run = Run { shipped, dir: dir.path().to_owned(), chains, shared, added };
    let mut counts = Counts::default();
    for fix in &fixes {
        run.fix(fix, live.as_mut(), &mut counts)?;
    }
    let Counts { code, applied, in_part, nothing, seen } = counts;
    println!("\n{code} fixes change code of programs or libraries. {applied} are in force in all of them that run,");
    println!("{in_part} in some; {nothing} make no difference to machine code alone. Of {seen} the effect was seen.");
    live.map_or(Ok(()), Live::end)
}

/// A cluster under load.
struct Live {
    cluster: Cluster,
    bench: Bench,
}

impl Live {
    fn start(postgres: &Postgres) -> Result<Live, String> {
        let cluster = Cluster::start(postgres, &[PRELOADED]);
        Bench::prepare(&cluster, 1);
        effects::prepare(&cluster)?;
        let bench = Bench::start(&cluster, 2, &[]);
        Ok(Live { cluster, bench })
    }

    fn end(mut self) -> Result<(), String> {
        println!("\n{} transactions of pgbench meanwhile, none failed.", self.bench.assert_clean());
        let revert = Stillpoint::new().args(["patch", "revert", "--all", "--exe"]).arg(self.cluster.executable()).run();
        self.cluster.assert_unharmed();
        println!("{}", if revert.code == Some(0) { "All were reverted." } else { revert.stderr.as_str() });
        Ok(())
    }
}

impl Run {
    /// Builds and applies one fix in each of its targets, and prints its row.
    fn fix(&mut self, fix: &str, live: Option<&mut Live>, counts: &mut Counts) -> Result<(), String> {
        let Files { targets, shared } = files(fix)?;
        if fix.starts_with(CONFIGURED) {
            self.added.push(added(fix, &self.dir)?);
        }
        let before = live.as_ref().map(|live| effects::show(&fix[..4], &live.cluster));
        let (mut good, mut bad, mut applied, mut in_server) = (Vec::new(), Vec::new(), 0, true);
        for target in &targets {
            match self.one(live.as_deref(), fix, target) {
                FixResult::Applied(functions) => {
                    applied += 1;
                    good.push(format!("{target}: {functions}"));
                }
                FixResult::BuiltOnly(functions) => {
                    good.push(format!("{target}: {functions} (built; no process runs it)"))
                }
                FixResult::Nothing => good.push(format!("{target}: no code that anything uses")),
                FixResult::Not(reason) => {
                    in_server &= target != "postgres";
                    bad.push(format!("{target}: {reason}"));
                }
            }
        }
        if shared && in_server {
            self.shared.push(fix.to_owned());
        }
        let effect = match (live, before) {
            (Some(live), Some(before)) => {
                live.cluster.assert_unharmed();
                effects::compare(&fix[..4], &before?, &live.cluster)?
            }
            _ => None,
        };
        counts.code += usize::from(!targets.is_empty());
        counts.applied += usize::from(applied > 0 && bad.is_empty());
        counts.in_part += usize::from(applied > 0 && !bad.is_empty());
        counts.nothing += usize::from(!targets.is_empty() && applied == 0 && bad.is_empty());
        counts.seen += usize::from(effect.is_some());
        let bad = if targets.is_empty() { "changes no code of the server".to_owned() } else { bad.join("; ") };
        let effect = effect.unwrap_or_default();
        println!("| {} | {} | {effect} | {bad} |", fix.trim_end_matches(".patch"), good.join("; "));
        Ok(())
    }

    fn one(&mut self, live: Option<&Live>, fix: &str, target: &str) -> FixResult {
        let chain = self.chains.entry(target.to_owned()).or_default();
        let name = format!("{}-{target}", &fix[..4]);
        let mut diffs: Vec<String> = self.shared.iter().chain(&chain.pending).cloned().collect();
        diffs.retain(|diff| !chain.diffs.contains(diff) && !chain.refused.contains(diff));
        diffs.push(fix.to_owned());
        let kept = match kept(&(&self.shipped, target, &diffs, &chain.diffs)) {
            Ok(kept) => kept,
            Err(why) => return FixResult::Not(why),
        };
        let output = kept.with_extension("patch");
        let mut build = builder("build").args(["--shipped", &self.shipped, "--target", target, "--name", &name, "-o"]);
        build = build.arg(&output).args(["--leave-out"]).args(TESTS).args(NOT_CONFIGURED);
        build = build.arg("--quilt").args(&diffs);
        if !chain.patches.is_empty() {
            build = build.arg("--on-top-of").args(&chain.diffs).arg("--earlier").args(&chain.patches);
        }
        if diffs.iter().any(|diff| diff.starts_with(CONFIGURED)) && !fix.starts_with(CONFIGURED) {
            build = build.arg("--extra-unit").args(&self.added);
        }
        let outcome = std::fs::read_to_string(&kept).unwrap_or_else(|_| {
            let run = build.run();
            let outcome = if matches!(run.code, Some(0 | 6)) { functions(&run).to_string() } else { why(&run) };
            let _ = std::fs::write(&kept, &outcome);
            outcome
        });
        let Ok(functions) = outcome.parse::<usize>() else {
            chain.refused.push(fix.to_owned());
            return FixResult::Not(outcome);
        };
        if !output.is_file() {
            chain.pending.push(fix.to_owned());
            return FixResult::Nothing;
        }
        let applied = live.map(|live| apply(&output, live.cluster.executable()));
        let not_mapped = applied.as_ref().is_some_and(|run| run.stderr.contains("does not map"));
        if let (Some(live), Some(run)) = (live, &applied)
            && run.code != Some(0)
            && !not_mapped
        {
            let exe = live.cluster.executable();
            let _ = Stillpoint::new().args(["patch", "revert", &name, "--exe"]).arg(exe).run();
            chain.refused.push(fix.to_owned());
            return FixResult::Not(run.stderr.lines().take(2).collect::<Vec<_>>().join(" "));
        }
        chain.diffs.extend(diffs);
        chain.patches.push(output);
        match applied {
            Some(_) if !not_mapped => FixResult::Applied(functions),
            _ => FixResult::BuiltOnly(functions),
        }
    }
}

/// Returns the path of a build's cached result, by all its inputs: an interrupted run continues from there.
fn kept(what: &impl std::fmt::Debug) -> Result<PathBuf, String> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let directory = stillpoint_testing::recipes::directory("series", "postgres-fixes")?;
    let tool = std::fs::metadata(binary()).and_then(|m| m.modified()).map_err(|e| format!("the tool: {e}"))?;
    let mut hash = DefaultHasher::new();
    format!("{tool:?} {what:?}").hash(&mut hash);
    Ok(directory.join(format!("{:016x}", hash.finish())))
}

fn apply(patch: &Path, executable: &Path) -> CliRun {
    let apply = Stillpoint::new().args(["patch", "apply"]).arg(patch).args(["--timeout", "10s", "--json", "--exe"]);
    apply.arg(executable).run()
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

/// Returns true for a fix: fixes have numbers of four digits, Debian's own changes have none.
fn is_fix(name: &str) -> bool {
    name.len() > 5 && name.as_bytes()[..4].iter().all(u8::is_ascii_digit) && name.as_bytes()[4] == b'-'
}

/// Returns the tree of the package, as `patch target` left it.
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

/// Installs the build below `into`, in the clean root where its paths are right.
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

/// Files that a fix changes.
struct Files {
    /// Executables and libraries with code of its files.
    targets: Vec<String>,
    /// True if other programs include a part of them as well.
    shared: bool,
}

fn text_of(fix: &str) -> Result<String, String> {
    let path = entry("source", &format!("{PACKAGE}_"))?.join("tree/debian/patches").join(fix);
    let text = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn files(fix: &str) -> Result<Files, String> {
    let text = text_of(fix)?;
    let mut found = Files { targets: Vec::new(), shared: false };
    let changed = text.lines().filter_map(|line| line.strip_prefix("+++ b/"));
    for file in changed.filter(|f| f.ends_with(".c") || f.ends_with(".h")) {
        let mut parts = file.split('/');
        let target = match (parts.next(), parts.next(), parts.next()) {
            (Some("contrib"), Some("intarray"), _) => "_int.so".to_owned(),
            (Some("contrib"), Some("spi"), _) => "refint.so".to_owned(),
            (Some("contrib"), Some("hstore_plpython"), _) => "hstore_plpython3.so".to_owned(),
            (Some("contrib"), Some(name), _) => format!("{name}.so"),
            (Some("src"), Some("interfaces"), Some("libpq")) => "libpq.so.5.13".to_owned(),
            (Some("src"), Some("bin"), Some(name)) => name.to_owned(),
            (Some("src"), Some("test"), _) => continue,
            (Some("src"), part, _) => {
                found.shared |= matches!(part, Some("include" | "common" | "port"));
                "postgres".to_owned()
            }
            _ => continue,
        };
        if !found.targets.contains(&target) {
            found.targets.push(target);
        }
    }
    // plug-ins use the functions that it gains
    found.targets.sort_by_key(|target| target != "postgres");
    Ok(found)
}

/// Writes the source file that a fix adds into a directory of its own below `dir`.
fn added(fix: &str, dir: &Path) -> Result<PathBuf, String> {
    let text = text_of(fix)?;
    let (_, part) = text.split_once(&format!("+++ b/{ADDED}\n")).ok_or_else(|| format!("{fix} adds no {ADDED}"))?;
    let lines = part.lines().skip(1).map_while(|line| line.strip_prefix('+'));
    let source: String = lines.map(|line| format!("{line}\n")).collect();
    let into = dir.join("added");
    let path = into.join(Path::new(ADDED).file_name().expect("it is a file"));
    std::fs::create_dir_all(&into)
        .and_then(|()| std::fs::write(&path, source))
        .map_err(|e| format!("write {}: {e}", path.display()))?;
    Ok(path)
}
