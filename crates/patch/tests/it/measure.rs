//! `stillpoint measure` against real servers: its counts must match the events on them.

use rustix::process::Signal;
use serde_json::Value;
use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;
use stillpoint_events::{Event, EventKind, patch};
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::load::{Arrivals, Load, Mix, Plan, Protocol, Target, fill};
use stillpoint_measure::record::{MarkKind, Record};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::packages::{self, Binary};
use stillpoint_patch_tests::server::{ChildGuard, Memcached, Redis};
use stillpoint_patch_tests::{skip, wait};
use tempfile::TempDir;

const KEYS: u64 = 20_000;

macro_rules! or_skip {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(why) => skip!(why),
        }
    };
}

fn directory() -> TempDir {
    TempDir::with_prefix("stillpoint-measure-").expect("make a directory")
}

fn address(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

fn protocol(mix: &str) -> Protocol {
    let mix: Mix = mix.parse().expect("a mix");
    Protocol::Redis { mix, keys: KEYS, value_bytes: 64 }
}

/// Returns a plan that lasts until it is stopped.
fn plan(redis: &Redis, mix: &str) -> Plan {
    let target = Target::Tcp(address(redis.port()));
    Plan {
        connections: 10,
        rate: 2_000.0,
        arrivals: Arrivals::Constant,
        duration: Duration::from_secs(3600),
        ..Plan::new(target, protocol(mix))
    }
}

fn filled(binary: &Binary) -> Redis {
    let redis = Redis::start(binary, &[]);
    let filled = fill(&Target::Tcp(address(redis.port())), &protocol("get"), |_| {}).unwrap();
    assert_eq!(filled.keys, KEYS);
    redis
}

fn answers(load: &Load, more: u64) {
    let before = load.counters().snapshot().counts.ok;
    wait::until("answers", || (load.counters().snapshot().counts.ok >= before + more).then_some(()));
}

#[test]
fn redis_is_loaded_recorded_and_compared_from_the_command_line() {
    let binary = or_skip!(packages::redis(None));
    let redis = Redis::start(&binary, &[]);
    let (dir, address) = (directory(), address(redis.port()));
    let keys = ["--keys", "20000", "--value-bytes", "100"];
    let run = Stillpoint::new().args(["measure", "load", "--addr"]).arg(&address).args(keys).json().succeed();
    assert_eq!(run.json()[0]["keys"], 20_000);
    assert_eq!(redis.client().command(&["DBSIZE"]).unwrap().integer(), 20_000);
    let record = dir.path().join("a.rec");
    let run = Stillpoint::new()
        .args(["measure", "redis", "--addr"])
        .arg(&address)
        .args(keys)
        .args(["--mix", "get=60,set=20,lua=5,blpop=5,incr=5,ping=5", "--blocking", "5", "--idle", "40"])
        .args(["--rate", "3000", "--duration", "2", "--strict", "--record"])
        .arg(&record)
        .json()
        .succeed();
    let result = &run.json()[0];
    let counts = &result["summary"]["counts"];
    assert_eq!(counts["requests"], counts["ok"], "{run}");
    assert!((5_000..7_000).contains(&counts["requests"].as_u64().unwrap()), "{run}");
    assert_eq!((&result["end"]["idle_alive"], &result["end"]["blocking_alive"]), (&40.into(), &5.into()));
    assert_eq!(result["summary"]["kinds"].as_array().unwrap().len(), 6, "{run}");
    let bytes = std::fs::metadata(&record).unwrap().len();
    assert!(bytes / counts["requests"].as_u64().unwrap() <= 12, "{bytes} bytes");

    let run = Stillpoint::new().args(["measure", "compare"]).args([&record, &record]).json().succeed();
    for row in run.json()[0]["rows"].as_array().unwrap() {
        assert_eq!(row["ratio"], 1.0, "{row}");
    }
}

#[test]
fn a_stopped_server_shows_as_a_blackout() {
    let binary = or_skip!(packages::redis(None));
    let mut redis = filled(&binary);
    let dir = directory();
    let record = dir.path().join("stop.rec");
    let load = Load::start(Plan { record: Some(record.clone()), ..plan(&redis, "get=80,set=20") }).unwrap();
    answers(&load, 500);
    let stopped_ns = now_ns();
    redis.process().signal(Signal::STOP);
    sleep(Duration::from_millis(400));
    redis.process().signal(Signal::CONT);
    let pause_ns = now_ns() - stopped_ns;
    answers(&load, 1000);
    load.stop();
    let finished = load.wait().unwrap();
    assert!(finished.is_clean(), "{finished:?}");
    let blackout = finished.summary.blackout;
    let noise_ns = 2_000_000_000;
    assert!((390_000_000..pause_ns + noise_ns).contains(&blackout.duration_ns), "{blackout:?} of {pause_ns} ns");
    assert!(blackout.from_ns.abs_diff(stopped_ns) < noise_ns, "{blackout:?} began at {stopped_ns}");
    // Two requests were due each millisecond; each of them must show the remaining part of the pause.
    let record = Record::open(&record).unwrap();
    let margin_ns = 50_000_000;
    let due = |t: u64| (stopped_ns + margin_ns..stopped_ns + 400_000_000 - margin_ns).contains(&t);
    let delayed: Vec<_> = record.samples.iter().filter(|sample| due(sample.scheduled_ns)).collect();
    assert!((595..=605).contains(&delayed.len()), "{} requests were due", delayed.len());
    assert!(delayed.iter().all(|sample| sample.ended_ns() >= stopped_ns + 400_000_000));
}

#[test]
fn a_killed_connection_is_counted_whether_it_works_or_idles() {
    let binary = or_skip!(packages::redis(None));
    let redis = filled(&binary);
    let dir = directory();
    let record = dir.path().join("kill.rec");
    let load = Load::start(Plan { idle: 7, record: Some(record.clone()), ..plan(&redis, "get=80,incr=20") }).unwrap();
    answers(&load, 200);
    let mut client = redis.client();
    let list = client.command(&["CLIENT", "LIST", "TYPE", "normal"]).unwrap().text().to_owned();
    let field = |line: &str, name: &str| {
        line.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
    };
    // An idle connection has never sent a command.
    let mut victims = Vec::new();
    for idle in [false, true] {
        let found = list.lines().find(|line| {
            let command = field(line, "cmd").unwrap_or_default();
            if idle { command == "NULL" } else { command == "get" || command == "incr" }
        });
        victims.push(field(found.unwrap_or_else(|| panic!("no such client: {list}")), "id").unwrap());
    }
    for (number, id) in victims.iter().enumerate() {
        assert_eq!(client.command(&["CLIENT", "KILL", "ID", id]).unwrap().integer(), 1);
        let wanted = number as u64 + 1;
        wait::until("the drop to be seen", || (load.counters().snapshot().dropped == wanted).then_some(()));
    }
    wait::until("both to be open again", || (load.counters().snapshot().open == 17).then_some(()));
    answers(&load, 200);
    load.stop();
    let finished = load.wait().unwrap();
    assert_eq!(finished.end.dropped, 2);
    assert_eq!((finished.end.idle_alive, finished.end.reconnect_failures), (7, 0));
    let counts = finished.summary.counts;
    assert_eq!((counts.errors, counts.wrong, counts.timeouts), (0, 0, 0), "{:?}", finished.complaints);
    assert!(!finished.is_clean());
    let marks = Record::open(&record).unwrap().marks;
    assert_eq!(marks.iter().filter(|mark| mark.what == MarkKind::Dropped).count(), 2, "{marks:?}");
}

#[test]
fn a_write_that_the_server_loses_is_a_wrong_answer() {
    let binary = or_skip!(packages::redis(None));
    let redis = filled(&binary);
    let load = Load::start(plan(&redis, "get=50,set=50")).unwrap();
    answers(&load, 200);
    assert_eq!(load.counters().snapshot().counts.failed(), 0);
    assert_eq!(redis.client().command(&["FLUSHALL"]).unwrap().text(), "OK");
    wait::until("the loss to be seen", || (load.counters().snapshot().counts.wrong > 0).then_some(()));
    load.stop();
    let finished = load.wait().unwrap();
    assert!(finished.complaints[0].contains("has lost its value"), "{:?}", finished.complaints);
}

#[test]
fn memcached_is_loaded_and_checked() {
    let binary = or_skip!(packages::memcached(None));
    let memcached = Memcached::start(&binary, &["-t", "2"]);
    let address = address(memcached.port());
    let fill = ["measure", "load", "--protocol", "memcached", "--keys", "5000", "--addr"];
    Stillpoint::new().args(fill).arg(&address).succeed();
    let run = Stillpoint::new()
        .args(["measure", "memcached", "--keys", "5000", "--mix", "get=70,set=25,version=5", "--idle", "5"])
        .args(["--rate", "2000", "--duration", "1", "--strict", "--addr"])
        .arg(&address)
        .json()
        .succeed();
    let result = &run.json()[0];
    assert!(result["summary"]["counts"]["ok"].as_u64().unwrap() > 1_000, "{run}");
    assert_eq!(result["end"]["idle_alive"], 5);
}

#[test]
fn what_cannot_be_read_or_reached_is_refused_by_name() {
    let dir = directory();
    let (other, page) = (dir.path().join("other"), dir.path().join("page.html"));
    std::fs::write(&other, "not a record").unwrap();
    let report = |record: &Path| {
        Stillpoint::new().args(["measure", "report", "--record"]).arg(record).arg("-o").arg(&page).run()
    };
    let run = report(&other);
    assert_eq!(run.code, Some(3), "{run}");
    assert!(run.stderr.contains(&format!("{} is damaged", other.display())), "{run}");
    let run = report(&dir.path().join("gone"));
    assert_eq!(run.code, Some(3), "{run}");
    assert!(run.stderr.contains("cannot open") && run.stderr.contains("gone"), "{run}");
    assert!(!page.exists());
    let run = Stillpoint::new().args(["measure", "redis", "--socket"]).arg(dir.path().join("no-socket")).run();
    assert_eq!(run.code, Some(1), "{run}");
    assert!(run.stderr.contains("no-socket"), "{run}");
    let run = Stillpoint::new().args(["measure", "redis", "--addr", "127.0.0.1:1", "--mix", "fly=1"]).run();
    assert_eq!(run.code, Some(2), "{run}");
}

/// Returns the events of an engine for one apply that lasts from `from_ns` to `to_ns`.
fn apply_events(from_ns: u64, to_ns: u64, active: &[&str]) -> Vec<Event> {
    let event = |t_ns, kind| Event::new(t_ns, Some(4711), kind);
    let phase = |phase: &str| EventKind::PhaseStarted { operation: "apply".into(), phase: phase.into() };
    let stop = |tid| {
        EventKind::Patch(patch::Event::ThreadStopped {
            tid,
            reason: "probe".into(),
            stopped_ns: 9_000 + 700 * tid as u64,
        })
    };
    let mut events = vec![event(from_ns, phase("check")), event(from_ns + 1, phase("migrate"))];
    events.extend((1..20).map(|tid| event(from_ns + 2, stop(tid))));
    let active = active.iter().map(|&name| name.to_owned()).collect();
    let duration_ns = to_ns - from_ns;
    events.push(event(
        to_ns,
        EventKind::Patch(patch::Event::Committed { transition: 1, active, duration_ns, threads: 19 }),
    ));
    events
}

/// Records three seconds of load with two operations in it, as files.
fn recorded_run(redis: &Redis, dir: &Path) -> (PathBuf, PathBuf) {
    let (record, events) = (dir.join("run.rec"), dir.join("events.jsonl"));
    let load = Load::start(Plan { record: Some(record.clone()), ..plan(redis, "get=80,set=20") }).unwrap();
    let mut told = Vec::new();
    for active in [&["CVE-2025-0001"][..], &["CVE-2025-0001", "<b>&CVE-2025-0002"]] {
        answers(&load, 1_500);
        let from_ns = now_ns();
        answers(&load, 60);
        told.extend(apply_events(from_ns, now_ns(), active));
    }
    answers(&load, 1_500);
    load.stop();
    assert!(load.wait().unwrap().is_clean());
    let lines: String = told.iter().map(|event| serde_json::to_string(event).unwrap() + "\n").collect();
    std::fs::write(&events, lines).unwrap();
    (record, events)
}

fn report(record: &Path, events: &Path, page: &Path) -> Value {
    let call = Stillpoint::new().args(["measure", "report", "--record"]).arg(record).arg("--events").arg(events);
    call.arg("--output").arg(page).json().succeed().json().remove(0)
}

#[test]
fn a_report_puts_requests_and_operations_together() {
    let binary = or_skip!(packages::redis(None));
    let redis = filled(&binary);
    let dir = directory();
    let (record, events) = recorded_run(&redis, dir.path());
    let page = dir.path().join("report.html");
    let told = report(&record, &events, &page);
    assert_eq!((&told["event"], &told["dropped"]), (&"report".into(), &0.into()));
    let operations = told["operations"].as_array().unwrap();
    assert_eq!(operations.len(), 2);
    assert_eq!(operations[1]["patches"][0], "<b>&CVE-2025-0002");
    assert_eq!(operations[0]["stop"]["count"], 19);
    let requests = |part: &Value| part["counts"]["requests"].as_u64().unwrap();
    for operation in operations {
        assert!(requests(&operation["during"]) >= 60, "{operation}");
        assert!(requests(&operation["before"]) >= 1_400 && requests(&operation["after"]) >= 1_400, "{operation}");
    }
    let all = requests(&told["summary"]);
    assert_eq!(requests(&told["during"]) + requests(&told["outside"]), all);

    let html = std::fs::read_to_string(&page).unwrap();
    for forbidden in ["http:", "https:", "<script", "src=", "url(", "@import", "<b>&CVE", "NaN"] {
        assert!(!html.contains(forbidden), "the page contains {forbidden}");
    }
    assert!(html.contains("&lt;b&gt;&amp;CVE-2025-0002"));
    assert!(html.contains("0 failed, 0 connections dropped while 2 changes were made to the running code"));
}

#[test]
fn a_record_of_a_killed_load_generator_is_still_of_use() {
    let binary = or_skip!(packages::redis(None));
    let redis = filled(&binary);
    let dir = directory();
    let (record, page) = (dir.path().join("cut.rec"), dir.path().join("cut.html"));
    let call = Stillpoint::new().args(["measure", "redis", "--duration", "3600", "--rate", "2000", "--addr"]);
    let call = call.arg(address(redis.port())).arg("--record").arg(&record);
    let mut process = ChildGuard::from_child(call.command().stdout(Stdio::null()).spawn().unwrap());
    wait::until("a second of the record", || {
        let read = Record::open(&record).ok()?;
        (read.samples.len() > 1_000).then_some(())
    });
    process.signal(Signal::KILL);
    wait::until("its end", || process.ended());
    let read = Record::open(&record).unwrap();
    assert!(read.end.is_none() && read.samples.len() > 1_000);
    let run = Stillpoint::new().args(["measure", "report", "--record"]).arg(&record).arg("-o").arg(&page).succeed();
    assert!(run.stderr.contains("cut off"), "{run}");
    assert!(std::fs::read_to_string(&page).unwrap().contains("did not end in order"));
}

/// Finds a browser that renders without a display.
fn browser() -> Option<PathBuf> {
    let names = ["chromium-headless-shell", "chromium", "google-chrome"];
    let path = std::env::var_os("PATH")?;
    let directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    names.iter().find_map(|name| directories.iter().map(|dir| dir.join(name)).find(|file| file.is_file()))
}

/// Renders the page to a picture and returns its width, height and the set of its colours.
fn rendered(browser: &Path, page: &Path, dir: &Path, dark: bool) -> (u32, u32, HashSet<[u8; 3]>) {
    let (picture, profile) = (dir.join(format!("{dark}.png")), dir.join(format!("profile-{dark}")));
    let mut command = Command::new(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]);
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
    command.args(["--hide-scrollbars", "--window-size=1240,1600"]);
    if dark {
        command.arg("--blink-settings=preferredColorScheme=0");
    }
    command.arg(format!("--user-data-dir={}", profile.display())).arg(format!("--screenshot={}", picture.display()));
    let output = command.arg(format!("file://{}", page.display())).output().expect("run the browser");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && picture.is_file(), "{} and {told}", output.status);
    let mut decoder = png::Decoder::new(BufReader::new(File::open(&picture).unwrap()));
    decoder.set_transformations(png::Transformations::normalize_to_color8() | png::Transformations::STRIP_16);
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().expect("a picture of known size")];
    let info = reader.next_frame(&mut pixels).unwrap();
    let samples = info.color_type.samples();
    assert!(samples >= 3, "the browser draws in colour");
    let colours = pixels[..info.buffer_size()].chunks_exact(samples).map(|p| [p[0], p[1], p[2]]).collect();
    (info.width, info.height, colours)
}

#[test]
fn the_page_renders_in_a_browser_light_and_dark() {
    let Some(browser) = browser() else { skip!("no chromium in PATH (Debian's chromium-headless-shell will do)") };
    let binary = or_skip!(packages::redis(None));
    let redis = filled(&binary);
    let dir = directory();
    let (record, events) = recorded_run(&redis, dir.path());
    let page = dir.path().join("report.html");
    report(&record, &events, &page);
    let (width, height, light) = rendered(&browser, &page, dir.path(), false);
    assert_eq!((width, height), (1240, 1600));
    assert!(light.len() > 100, "{} colours: the page is blank or has no plots", light.len());
    let bright = |colour: &[u8; 3]| colour.iter().all(|&part| part > 240);
    assert!(light.iter().any(bright));
    // Three versions of the code ran: grey, and two colours far from grey.
    let vivid = |c: &&[u8; 3]| c.iter().max().unwrap() - c.iter().min().unwrap() > 90;
    assert!(light.iter().filter(vivid).count() > 10);
    let (_, _, dark) = rendered(&browser, &page, dir.path(), true);
    assert!(dark.len() > 100 && dark.contains(&[0x0e, 0x11, 0x16]), "the dark scheme has its own background");
    assert!(!light.contains(&[0x0e, 0x11, 0x16]));
}
