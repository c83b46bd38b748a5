//! Debian's OpenLDAP, Apache, Samba and Node.js under their own loads: each change of ours and each diff of the package's own
//! series, in reverse, as a patch of its own, applied, seen and reverted; before that all changes of the program together,
//! many times.
//!
//! usage: daemons patches STATE ROUNDS SUBJECT...   with slapd, apache-event, apache-prefork, samba, node; NAME-points
//! is the same program with quiescence points, patched in global mode, and without a patch for each change
//!
//! Results are kept in the directory STATE after each group of patches under a load without a failed request; a run goes
//! on where the one before was ended. It prints a table for each subject.
//!
//! `daemons latency STATE SECONDS SUBJECT...` and `daemons overhead STATE SECONDS SUBJECT...` compare modes of quiescence:
//! see the modules.

mod latency;
mod overhead;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use stillpoint_measure::load::Plan;
use stillpoint_patch_bench::build_report::{functions, why};
use stillpoint_patch_bench::machine::machine;
use stillpoint_patch_bench::package_diff::{changes_code, reversed};
use stillpoint_patch_tests::annotation;
use stillpoint_patch_tests::cli::Run;
use stillpoint_patch_tests::daemons::apache::{self, Apache, Mpm, Visitors};
use stillpoint_patch_tests::daemons::node::{self, Node};
use stillpoint_patch_tests::daemons::samba::{self, Samba};
use stillpoint_patch_tests::daemons::slapd::{self, Slapd};
use stillpoint_patch_tests::daemons::{Change, Daemon, DaemonLoad, Package};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;

const USAGE: &str =
    "usage: daemons patches STATE ROUNDS SUBJECT..., or daemons latency|overhead STATE SECONDS SUBJECT...";
/// Patches that one server under one load gets.
const GROUP_PATCHES: usize = 10;
const GROUP_ROUNDS: u32 = 50;
/// File of the results in the directory of a subject.
const RESULTS: &str = "results.json";

/// A server and what it is patched with.
struct Subject {
    name: String,
    kind: Kind,
    package: Package,
    changes: Vec<Change>,
    /// Options of the builder and of each call, for a program with quiescence points.
    points: Option<(Vec<OsString>, [&'static str; 4])>,
}

#[derive(Clone, Copy)]
enum Kind {
    Slapd,
    Apache(Mpm),
    Samba,
    Node,
}

/// One patch.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    target: String,
    functions: usize,
    /// Durations of the two commands, in milliseconds.
    apply_ms: u64,
    revert_ms: u64,
    /// Observation, or the reason why there is no patch.
    result: String,
    good: bool,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct State {
    version: String,
    rows: BTreeMap<String, Row>,
    rounds: u32,
    answers: u64,
    visits: u64,
    downloads: u64,
}

/// One patch to build: a change of ours, or a diff of the series in reverse, for one target.
enum Case {
    Change(Change),
    Reversed { diff: PathBuf, target: String },
}

/// A server under its load.
struct Session {
    daemon: Box<dyn Daemon>,
    load: Box<dyn DaemonLoad>,
    visitors: Option<Visitors>,
}

fn main() {
    if let Err(error) = run() {
        eprintln!("daemons: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [part, state, amount, subjects @ ..] = &arguments[..] else {
        return Err(USAGE.into());
    };
    let amount: u32 = amount.parse().map_err(|_| format!("`{amount}` is no number of rounds or seconds"))?;
    println!("On {}.", machine());
    match part.as_str() {
        "patches" => patches(Path::new(state), amount, subjects),
        "latency" => latency::latency(Path::new(state), amount, subjects),
        "overhead" => overhead::overhead(Path::new(state), amount, subjects),
        _ => Err(USAGE.into()),
    }
}

fn patches(state: &Path, rounds: u32, subjects: &[String]) -> Result<(), String> {
    for name in subjects {
        let subject = Subject::named(name)?;
        let state = subject.directory(state)?;
        let mut results = subject.load_state(&state)?;
        subject.rounds(&state, &mut results, rounds)?;
        if subject.points.is_none() {
            subject.patches(&state, &mut results)?;
        }
        print(&subject, &results);
    }
    Ok(())
}

impl Subject {
    fn named(name: &str) -> Result<Subject, String> {
        let (plain, points) = name.strip_suffix("-points").map_or((name, false), |plain| (plain, true));
        let apache = |mpm| (Kind::Apache(mpm), apache::package(), apache::changes(mpm), apache::INTEGRATION.0);
        let (kind, package, changes, integration) = match plain {
            "slapd" => (Kind::Slapd, slapd::package(), slapd::changes(), slapd::INTEGRATION.0),
            "apache-event" => apache(Mpm::Event),
            "apache-prefork" => apache(Mpm::Prefork),
            "samba" => (Kind::Samba, samba::package(), samba::changes(), samba::INTEGRATION.0),
            "node" => (Kind::Node, node::package(), node::changes(), node::INTEGRATION.0),
            _ => return Err(format!("no subject {name}")),
        };
        let files = match kind {
            Kind::Slapd => &slapd::INTEGRATION.1[..],
            Kind::Apache(_) => &apache::INTEGRATION.1[..],
            Kind::Samba => &samba::INTEGRATION.1[..],
            Kind::Node => &node::INTEGRATION.1[..],
        };
        let package = package.as_ref().map_err(ToString::to_string)?;
        let (package, points) = match points {
            false => (package.clone(), None),
            true => {
                let modes = ["--timeout", "60s", "--quiescence", "global"];
                (package.with_points(integration, files)?, Some((annotation::options(integration)?, modes)))
            }
        };
        Ok(Subject { name: name.to_owned(), kind, package, changes, points })
    }

    /// Returns the directory of its results, which exists.
    fn directory(&self, state: &Path) -> Result<PathBuf, String> {
        let state = state.join(&self.name);
        fs::create_dir_all(&state).map_err(|e| format!("{}: {e}", state.display()))?;
        Ok(state)
    }

    /// Starts the server; the plan is that of its load.
    fn serve(&self) -> Result<(Box<dyn Daemon>, Plan), String> {
        let package = &self.package;
        Ok(match self.kind {
            Kind::Slapd => {
                let slapd = Slapd::start(package, &package.program(slapd::PROGRAM));
                let plan = slapd.load();
                (Box::new(slapd), plan)
            }
            Kind::Apache(mpm) => {
                let apache = Apache::start(package, &package.program(apache::PROGRAM), mpm);
                let plan = apache.load();
                (Box::new(apache), plan)
            }
            Kind::Node => {
                let node = Node::start(&node::program(package)?);
                let plan = node.load();
                (Box::new(node), plan)
            }
            Kind::Samba => return Err("the clients of Samba keep no record of their requests".into()),
        })
    }

    fn start(&self) -> Result<Session, String> {
        if matches!(self.kind, Kind::Samba) {
            let samba = Samba::start(&self.package, &self.package.program(samba::PROGRAM));
            let load = Box::new(samba.load());
            return Ok(Session { daemon: Box::new(samba), load, visitors: None });
        }
        let (mut daemon, plan) = self.serve()?;
        let visitors = matches!(self.kind, Kind::Apache(_)).then(|| Visitors::start(daemon.server().port(), 4));
        Ok(Session { daemon, load: Box::new(MonitoredLoad::of(plan)), visitors })
    }

    fn load_state(&self, state: &Path) -> Result<State, String> {
        let text = fs::read(state.join(RESULTS)).unwrap_or_default();
        let kept: State = serde_json::from_slice(&text).unwrap_or_default();
        let fresh = State { version: self.package.version.clone(), ..State::default() };
        Ok(if kept.version == fresh.version { kept } else { fresh })
    }

    fn store(state: &Path, results: &State) -> Result<(), String> {
        let text = serde_json::to_vec_pretty(results).map_err(|e| e.to_string())?;
        let file = state.join(RESULTS);
        fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))
    }

    /// Returns the patches to build, by name.
    fn cases(&self, state: &Path) -> Result<Vec<(String, Case)>, String> {
        let mut cases: Vec<(String, Case)> =
            self.changes.iter().map(|change| (change.name.to_owned(), Case::Change(*change))).collect();
        let mut targets: Vec<&str> = self.changes.iter().map(|change| change.target).collect();
        targets.dedup();
        let directory = self.package.source.join("debian/patches");
        let series = fs::read_to_string(directory.join("series")).unwrap_or_default();
        for name in series.lines().filter_map(|line| line.split_whitespace().next()).filter(|n| !n.starts_with('#')) {
            let text = fs::read(directory.join(name)).map_err(|e| format!("read {name}: {e}"))?;
            if !changes_code(&text) {
                continue;
            }
            let diff = state.join(format!("reversed-{}", name.replace('/', "%")));
            fs::write(&diff, reversed(&text)).map_err(|e| format!("write {}: {e}", diff.display()))?;
            for target in &targets {
                let case = Case::Reversed { diff: diff.clone(), target: (*target).to_owned() };
                cases.push((format!("{name} in {}", file_name(target)), case));
            }
        }
        Ok(cases)
    }

    fn patches(&self, state: &Path, results: &mut State) -> Result<(), String> {
        let mut cases = self.cases(state)?;
        cases.retain(|(name, _)| !results.rows.contains_key(name));
        for group in cases.chunks(GROUP_PATCHES) {
            let built: Vec<_> =
                group.iter().map(|(name, case)| self.build(name, case, state)).collect::<Result<_, _>>()?;
            let mut session = self.start()?;
            let mut rows = Vec::new();
            for ((name, case), (patch, run)) in group.iter().zip(&built) {
                let row = session.one(case, patch, run);
                eprintln!("{} {name}: {row:?}", self.name);
                rows.push((name.clone(), row));
            }
            session.end(results);
            results.rows.extend(rows);
            Subject::store(state, results)?;
        }
        Ok(())
    }

    fn build(&self, name: &str, case: &Case, state: &Path) -> Result<(PathBuf, Run), String> {
        let short: String = name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
        match case {
            Case::Change(change) => self.package.build(&[*change], &short, state, &[]),
            Case::Reversed { diff, target } => {
                let patch = state.join(format!("{short}.patch"));
                let build = self.package.call("build").arg("--diff").arg(diff).arg("--target");
                let build = build.arg(self.package.root.join(target)).arg("--name").arg(&short[..short.len().min(60)]);
                Ok((patch.clone(), build.arg("--output").arg(&patch).json().run()))
            }
        }
    }

    fn has_points(&self) -> bool {
        self.points.is_some()
    }

    /// Builds all changes of the program as one patch.
    fn patch_of_all(&self, state: &Path) -> Result<(PathBuf, Vec<Change>), String> {
        let options = self.points.as_ref().map_or(&[][..], |(options, _)| &options[..]);
        let target = self.changes[0].target;
        let changes: Vec<Change> = self.changes.iter().copied().filter(|change| change.target == target).collect();
        let (patch, run) = self.package.build(&changes, "rounds", state, options)?;
        if run.code == Some(0) { Ok((patch, changes)) } else { Err(run.to_string()) }
    }

    fn rounds(&self, state: &Path, results: &mut State, rounds: u32) -> Result<(), String> {
        let modes = self.points.as_ref().map_or(&[][..], |(_, modes)| &modes[..]);
        let (patch, changes) = self.patch_of_all(state)?;
        while results.rounds < rounds {
            let group = GROUP_ROUNDS.min(rounds - results.rounds);
            let mut session = self.start()?;
            for round in 0..group as usize {
                let one = &changes[round % changes.len()..][..1];
                let load = &session.load;
                session.daemon.there_and_back(&patch, one, modes, &|| load.answered(20));
            }
            session.end(results);
            results.rounds += group;
            Subject::store(state, results)?;
        }
        Ok(())
    }
}

impl Session {
    /// Applies one patch and reverts it.
    fn one(&mut self, case: &Case, patch: &Path, build: &Run) -> Row {
        let (target, shown) = match case {
            Case::Change(change) => (file_name(change.target), std::slice::from_ref(change)),
            Case::Reversed { target, .. } => (file_name(target), &[][..]),
        };
        let row =
            Row { target, functions: functions(build), apply_ms: 0, revert_ms: 0, result: String::new(), good: false };
        if build.code != Some(0) || !patch.is_file() {
            return Row { result: why(build), good: build.code == Some(6), ..row };
        }
        let began = Instant::now();
        let apply = self.daemon.call("apply").arg(patch).args(["--timeout", "20s"]).run();
        let apply_ms = began.elapsed().as_millis() as u64;
        if apply.code != Some(0) {
            return Row { result: apply.stderr.lines().take(2).collect::<Vec<_>>().join(" "), ..row };
        }
        self.load.answered(50);
        self.daemon.assert_shows(shown, true);
        let began = Instant::now();
        self.daemon.call("revert").succeed();
        let revert_ms = began.elapsed().as_millis() as u64;
        self.load.answered(50);
        self.daemon.assert_unharmed();
        self.daemon.assert_shows(shown, false);
        let seen = if shown.is_empty() { "applied and reverted" } else { "seen, and not after the revert" };
        Row { apply_ms, revert_ms, result: seen.into(), good: true, ..row }
    }

    fn end(mut self, results: &mut State) {
        // a group may have no patch at all
        self.load.answered(1);
        if let Some(visitors) = self.visitors {
            let (visits, downloads) = visitors.assert_clean();
            results.visits += visits;
            results.downloads += downloads;
        }
        results.answers += self.load.assert_clean();
        self.daemon.assert_unharmed();
    }
}

fn file_name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

fn print(subject: &Subject, results: &State) {
    let State { version, rows, rounds, answers, visits, downloads } = results;
    let built = if subject.points.is_some() { "built with quiescence points" } else { "Debian's own binary" };
    println!("\n## {}: {} {version}, {built}\n", subject.name, subject.package.name);
    if subject.points.is_none() {
        println!("| patch | target | functions | apply ms | revert ms | result |\n|---|---|---|---|---|---|");
        for (name, row) in rows {
            let Row { target, functions, apply_ms, revert_ms, result, .. } = row;
            println!("| {name} | {target} | {functions} | {apply_ms} | {revert_ms} | {result} |");
        }
        let own = |name: &&String| subject.changes.iter().any(|change| change.name == name.as_str());
        let seen = rows.iter().filter(|(name, row)| own(name) && row.good).count();
        println!("\n{seen} of {} changes of ours were applied, seen and reverted.", subject.changes.len());
    }
    let mode = if subject.points.is_some() { " in global mode" } else { "" };
    println!("{rounds} rounds{mode} of all changes of the program as one patch, one of them seen in each round.");
    println!("{answers} requests of the load were answered, none wrongly, none lost; no connection was dropped.");
    if *visits > 0 {
        println!("{visits} connections of one request each, and {downloads} slow downloads, were served to the end.");
    }
}
