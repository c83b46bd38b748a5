//! `make demo`: a running redis gets its CVE fixes one after another while clients use it without any disturbance.
//!
//! All steps use the `stillpoint` command line, as a person would. The demo ends with an error if one of its promises
//! was broken.

mod narrator;
mod table;

use narrator::Narrator;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use stillpoint_patch_bench::operation::{Operation, Why};
use stillpoint_patch_tests::effects::{self, EFFECTS};
use stillpoint_patch_tests::load::{Clients, Load, LoadResult};
use stillpoint_patch_tests::series::{Series, SeriesPatch};
use stillpoint_patch_tests::server::Redis;
use stillpoint_patch_tests::{cli::Stillpoint, packages, patch_calls, workspace_root};
use table::Change;

/// Keys in the database.
const KEYS: u64 = 1_000_000;
/// The diff that cannot be a live patch.
const REFUSED: &str = "CVE-2025-46818";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut narrator = Narrator::new();
    let dir = workspace_root().join("target/demo");
    fs::create_dir_all(&dir).map_err(|e| format!("make {}: {e}", dir.display()))?;

    narrator.step("Build a redis without its CVE fixes, and live patches from Debian's own diffs");
    let series = Series::build(&[], &mut |text| narrator.print(text))?;
    show_refused(&narrator, &series)?;

    narrator.step("Start it with a million keys and put it under load");
    let clients = Clients { keys: KEYS, ..Clients::default() };
    let redis = Redis::start(&series.binary, &[]);
    Load::fill(redis.port(), &clients);
    let mut load = Load::start(redis.port(), &clients, &dir, "demo");
    narrator.print(&format!(
        "pid {}: {} requests a second on {} connections ({}), {} idle connections, {} blocked in BLPOP",
        redis.pid(),
        clients.rate,
        clients.connections,
        clients.mix,
        clients.idle,
        clients.blocking
    ));
    let memory = fs::read_to_string(format!("/proc/{}/status", redis.pid())).unwrap_or_default();
    let threads = memory.lines().find_map(|line| line.strip_prefix("Threads:")).unwrap_or("?").trim();
    narrator.print(&format!("it has {threads} threads and will keep its pid, its connections and its data"));
    rest(3);
    ask_all(&narrator, &redis, |_| false)?;

    narrator.step(&format!("Apply {} patches one after another while the load continues", series.patches.len()));
    let mut changes = Vec::new();
    for patch in &series.patches {
        changes.push(apply(&narrator, &redis, patch)?);
        load.assert_running();
    }
    ask_all(&narrator, &redis, |_| true)?;
    narrator.print("the first one again:");
    let again = patch_calls::apply(&series.patches[0].file, redis.pid()).run();
    expect(again.code == Some(0), || again.to_string())?;
    print_indented(&again.stdout);

    narrator.step("List the patches of the process");
    print_indented(&patch_calls::status(redis.pid()).succeed().stdout);

    narrator.step("Revert some, observe the old answers, and apply them again");
    let newest_effect = EFFECTS.last().expect("there are effects");
    let from = series.patches.iter().rposition(|patch| patch.diff.contains(newest_effect.diff));
    let from = from.ok_or_else(|| format!("no patch for {}", newest_effect.cve))?;
    for patch in series.patches[from..].iter().rev() {
        changes.push(revert(&narrator, &redis, patch)?);
    }
    ask_all(&narrator, &redis, |effect| effect.cve != newest_effect.cve)?;
    for patch in &series.patches[from..] {
        changes.push(apply(&narrator, &redis, patch)?);
    }
    ask_all(&narrator, &redis, |_| true)?;
    rest(2);

    narrator.step("What the clients noticed");
    let events = dir.join("events.jsonl");
    write_events(&events, &changes)?;
    let record = load.record_path().to_owned();
    let observed = load.finish();
    conclude(&changes, &observed)?;
    report(&narrator, &record, &events, &dir)?;
    drop(redis);

    older_package(&mut narrator)?;
    println!("\nDone: every check passed.");
    Ok(())
}

/// Shows that the diff that must be refused was refused, before any process was touched.
fn show_refused(narrator: &Narrator, series: &Series) -> Result<(), String> {
    for refused in &series.refused {
        narrator.print(&format!("{} cannot be a live patch, and no process was touched:", refused.diff));
        refused.reasons.iter().for_each(|reason| println!("            {reason}"));
    }
    let names: Vec<&str> = series.refused.iter().map(|refused| refused.diff.as_str()).collect();
    expect(names.len() == 1 && names[0].contains(REFUSED), || {
        format!("{REFUSED} and no other was to be refused, but refused were: {names:?}")
    })
}

/// Sends every harmless request whose answer shows a fix, and compares the answers with the expected ones.
fn ask_all(narrator: &Narrator, redis: &Redis, expected: impl Fn(&effects::Effect) -> bool) -> Result<(), String> {
    for effect in &EFFECTS {
        let answer = effect.ask(redis.port()).map_err(|e| format!("{}: {e}", effect.request))?;
        let word = if answer.fixed { "fixed  " } else { "not yet" };
        narrator.print(&format!("{word} {}  {} -> {}", effect.cve, effect.request, answer.text));
        expect(answer.fixed == expected(effect), || format!("{} answered {:?}", effect.request, answer.text))?;
    }
    Ok(())
}

fn apply(narrator: &Narrator, redis: &Redis, patch: &SeriesPatch) -> Result<Change, String> {
    let change = change(narrator, "apply", patch, patch_calls::apply(&patch.file, redis.pid()))?;
    for effect in effects::of_diff(&patch.diff) {
        let answer = effect.ask(redis.port()).map_err(|e| format!("{}: {e}", effect.request))?;
        expect(answer.fixed, || {
            format!("{} is applied, but {} answered {:?}", patch.name, effect.request, answer.text)
        })?;
    }
    Ok(change)
}

fn revert(narrator: &Narrator, redis: &Redis, patch: &SeriesPatch) -> Result<Change, String> {
    change(narrator, "revert", patch, patch_calls::revert(redis.pid()))
}

fn change(narrator: &Narrator, verb: &'static str, patch: &SeriesPatch, call: Stillpoint) -> Result<Change, String> {
    let operation = Operation::of(call);
    expect(operation.run.code == Some(0), || operation.run.to_string())?;
    let migrated = operation.migrated_ns.ok_or_else(|| format!("{verb} reported no commit: {}", operation.run))?;
    let probed = operation.stopped(Why::Probe).max().unwrap_or(0);
    narrator.print(&format!(
        "{verb} {}: {} functions; {} threads migrated in {:.2} ms, probed for at most {:.0} us each",
        patch.name,
        patch.functions,
        operation.threads,
        migrated as f64 / 1e6,
        probed as f64 / 1e3
    ));
    // The table compares the seconds around each change.
    std::thread::sleep(Duration::from_nanos(2 * table::AROUND_NS));
    Ok(Change { verb, name: patch.name.clone(), operation })
}

fn conclude(changes: &[Change], observed: &LoadResult) -> Result<(), String> {
    println!("{}", table::render(changes, observed));
    let all = observed.all();
    let failed = all.counts.failed();
    println!(
        "   {} requests: {} errors, {} wrong answers, {} timed out, {} lost; {} dropped connections; {} idle or blocked ones dead",
        all.counts.requests,
        all.counts.errors,
        all.counts.wrong,
        all.counts.timeouts,
        all.counts.lost,
        observed.dropped(),
        observed.dead()
    );
    println!("   longest time in which no client got an answer: {:.2} ms", all.blackout.duration_ns as f64 / 1e6);
    expect(failed == 0 && observed.dropped() == 0 && observed.dead() == 0, || {
        format!("clients noticed: {}", observed.result)
    })
}

fn write_events(path: &Path, changes: &[Change]) -> Result<(), String> {
    let text: String = changes.iter().map(|change| change.operation.run.stdout.as_str()).collect();
    fs::write(path, text).map_err(|e| format!("write {}: {e}", path.display()))
}

/// Draws latency over time, coloured by the version of the code.
fn report(narrator: &Narrator, record: &Path, events: &Path, dir: &Path) -> Result<(), String> {
    let html: PathBuf = dir.join("report.html");
    let call =
        Stillpoint::new().args(["measure", "report", "--record"]).arg(record).arg("--events").arg(events).arg("-o");
    let run = call.arg(&html).run();
    expect(run.code == Some(0), || run.to_string())?;
    narrator.print(&format!("latency over time, coloured by version: {}", html.display()));
    Ok(())
}

/// Patches Debian's own, older binary, exactly as shipped, if the archive still has one.
fn older_package(narrator: &mut Narrator) -> Result<(), String> {
    narrator
        .step("Debian's own older redis-server, unmodified and stripped, brought to the newest fixes while it runs");
    let versions = packages::versions_with_source(&["redis-server", "redis-tools"])?;
    let Some(older) = versions.get(1) else {
        narrator.print(&format!(
            "the archive offers {} only, so there is no older binary to show it on",
            versions.join("")
        ));
        return Ok(());
    };
    let binary = match packages::redis(Some(older)) {
        Ok(binary) => binary,
        Err(why) => {
            narrator.print(&format!("{older} cannot be downloaded, so it is not shown: {why}"));
            return Ok(());
        }
    };
    let series = Series::for_packaged(older, &mut |text| narrator.print(text))?;
    expect(series.refused.is_empty(), || format!("refused: {:?}", series.refused))?;
    let redis = Redis::start(&binary, &[]);
    let lacking: Vec<_> =
        EFFECTS.iter().filter(|effect| series.patches.iter().any(|p| p.diff.contains(effect.diff))).collect();
    ask_all(narrator, &redis, |effect| !lacking.iter().any(|l| l.cve == effect.cve))?;
    for patch in &series.patches {
        apply(narrator, &redis, patch)?;
    }
    ask_all(narrator, &redis, |_| true)?;
    print_indented(&patch_calls::status(redis.pid()).succeed().stdout);
    Ok(())
}

fn print_indented(text: &str) {
    text.lines().for_each(|line| println!("          | {line}"));
}

fn expect(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn rest(seconds: u64) {
    std::thread::sleep(Duration::from_secs(seconds));
}
