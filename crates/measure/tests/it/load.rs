//! Tests of the load generator against servers of our own that misbehave on purpose.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use stillpoint_measure::load::{Arrivals, Load, Plan, Protocol, Target, fill};
use stillpoint_measure::record::{MarkKind, Outcome, Record};
use stillpoint_measure::summary::Summary;
use stillpoint_measure::{Error, clock};

const LONG: Duration = Duration::from_secs(60);

/// Behaviour of the server towards its clients.
#[derive(Default)]
struct Mood {
    /// All connections stop answering until this time (`CLOCK_MONOTONIC`).
    pause_until_ns: AtomicU64,
    /// Each connection damages the next echo.
    damage: AtomicBool,
    /// The next connection that reads anything disconnects.
    hang_up: AtomicBool,
}

/// Starts an echo server with a thread for each connection.
fn echo_server() -> (Target, Arc<Mood>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = Target::Tcp(listener.local_addr().unwrap().to_string());
    let mood = Arc::new(Mood::default());
    let for_server = Arc::clone(&mood);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, mood) = (stream.unwrap(), Arc::clone(&for_server));
            thread::spawn(move || echo(stream, &mood));
        }
    });
    (target, mood)
}

fn echo(mut stream: TcpStream, mood: &Mood) {
    stream.set_nodelay(true).unwrap();
    let mut buffer = [0; 65536];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        if mood.hang_up.swap(false, Ordering::SeqCst) {
            return;
        }
        let resume_ns = mood.pause_until_ns.load(Ordering::SeqCst);
        thread::sleep(Duration::from_nanos(resume_ns.saturating_sub(clock::now_ns())));
        if mood.damage.swap(false, Ordering::SeqCst) {
            buffer[0] ^= 1;
        }
        if stream.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

fn plan(target: Target) -> Plan {
    Plan {
        connections: 4,
        rate: 1000.0,
        arrivals: Arrivals::Constant,
        duration: Duration::from_secs(2),
        ..Plan::new(target, Protocol::Tcp { value_bytes: 64 })
    }
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < LONG, "{what} did not happen");
        thread::sleep(Duration::from_millis(2));
    }
}

fn record_path() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.rec");
    (dir, path)
}

/// Coordinated omission: with four connections and one request in progress on each, a closed loop would show the pause four times. All of
/// the 200 requests that were due meanwhile must show it.
#[test]
fn a_pause_shows_in_every_request_that_was_due_meanwhile() {
    const PAUSE_NS: u64 = 200_000_000;
    let (target, mood) = echo_server();
    let (_dir, path) = record_path();
    let load = Load::start(Plan { pipeline: 1, record: Some(path.clone()), ..plan(target) }).unwrap();
    wait_for("an answer", || load.counters().snapshot().counts.ok > 200);
    let paused_ns = clock::now_ns();
    mood.pause_until_ns.store(paused_ns + PAUSE_NS, Ordering::SeqCst);
    let finished = load.wait().unwrap();
    assert!(finished.is_clean(), "{finished:?}");
    assert_eq!(finished.summary.counts.requests, 2000);

    let record = Record::open(&path).unwrap();
    assert_eq!(record.samples.len(), 2000);
    assert_eq!(record.end.unwrap(), finished.end);
    // Due in the pause, with a margin for noise of the machine: these requests waited for the rest of the pause.
    let margin_ns = 20_000_000;
    let resumed_ns = paused_ns + PAUSE_NS;
    let due = |s: &&stillpoint_measure::record::Sample| {
        s.scheduled_ns > paused_ns + margin_ns && s.scheduled_ns < resumed_ns - margin_ns
    };
    let delayed: Vec<_> = record.samples.iter().filter(due).collect();
    assert!((155..=165).contains(&delayed.len()), "one a millisecond: {}", delayed.len());
    for sample in delayed {
        assert!(sample.ended_ns() >= resumed_ns, "{sample:?} was answered by a server that paused");
        assert!(sample.latency_ns >= resumed_ns - sample.scheduled_ns);
    }
    let max_ms = finished.summary.latency.max_ns / 1_000_000;
    assert!((180..5_000).contains(&max_ms), "{max_ms} ms");
    let blackout = finished.summary.blackout;
    assert!((180..5_000).contains(&(blackout.duration_ns / 1_000_000)), "{blackout:?}");
    assert!(blackout.from_ns + 500_000_000 > paused_ns && blackout.from_ns < resumed_ns, "{blackout:?}");
    // The same figures from the record, by another implementation.
    let again = Summary::of_record(&record);
    assert_eq!(again.latency, finished.summary.latency);
    let apart = again.blackout.duration_ns.abs_diff(blackout.duration_ns);
    assert!(apart < 5_000_000, "{:?} against {blackout:?}", again.blackout);
}

#[test]
fn a_wrong_answer_is_neither_an_error_nor_right() {
    let (target, mood) = echo_server();
    let load = Load::start(plan(target)).unwrap();
    wait_for("an answer", || load.counters().snapshot().counts.ok > 100);
    mood.damage.store(true, Ordering::SeqCst);
    wait_for("a wrong answer", || load.counters().snapshot().counts.wrong == 1);
    load.stop();
    let finished = load.wait().unwrap();
    let counts = finished.summary.counts;
    assert_eq!((counts.wrong, counts.errors, counts.timeouts, counts.lost), (1, 0, 0, 0));
    assert!(!finished.is_clean());
    assert!(finished.complaints[0].contains("echo differs"), "{:?}", finished.complaints);
}

#[test]
fn a_dropped_connection_is_counted_and_opened_again() {
    let (target, mood) = echo_server();
    let (_dir, path) = record_path();
    let load = Load::start(Plan { record: Some(path.clone()), ..plan(target) }).unwrap();
    wait_for("an answer", || load.counters().snapshot().counts.ok > 100);
    mood.hang_up.store(true, Ordering::SeqCst);
    wait_for("a drop", || load.counters().snapshot().dropped == 1);
    wait_for("a reconnect", || load.counters().snapshot().open == 4);
    let finished = load.wait().unwrap();
    assert_eq!(finished.end.dropped, 1);
    let counts = finished.summary.counts;
    assert!(counts.lost >= 1 && counts.lost == counts.failed(), "{counts:?}");
    let record = Record::open(&path).unwrap();
    let lost = record.samples.iter().filter(|sample| sample.outcome == Outcome::Lost).count() as u64;
    assert_eq!(lost, counts.lost);
    let kinds: Vec<_> = record.marks.iter().map(|mark| mark.what).collect();
    assert_eq!(kinds, [MarkKind::Dropped, MarkKind::Reconnected]);
}

#[test]
fn what_is_never_answered_times_out_and_every_request_is_accounted_for() {
    let (target, mood) = echo_server();
    let timeout = Duration::from_millis(300);
    let load = Load::start(Plan { timeout, pipeline: 2, ..plan(target) }).unwrap();
    wait_for("an answer", || load.counters().snapshot().counts.ok > 100);
    mood.pause_until_ns.store(u64::MAX, Ordering::SeqCst);
    let finished = load.wait().unwrap();
    let counts = finished.summary.counts;
    assert_eq!(counts.requests, 2000, "also those that found no room");
    assert_eq!(counts.ok + counts.timeouts, 2000);
    assert!(counts.timeouts > 100);
    assert!(finished.summary.latency.max_ns >= 300_000_000);
}

#[test]
fn a_stop_ends_the_schedule_and_loses_nothing() {
    let (target, _mood) = echo_server();
    let load = Load::start(Plan { duration: Duration::from_secs(3600), ..plan(target) }).unwrap();
    wait_for("an answer", || load.counters().snapshot().counts.ok > 50);
    load.stop();
    let finished = load.wait().unwrap();
    assert!(finished.is_clean() && finished.summary.counts.requests < 1_000_000);
}

#[test]
fn a_missing_server_is_reported_before_any_request() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let error = Load::start(plan(Target::Tcp(address.clone()))).unwrap_err();
    assert!(matches!(&error, Error::Connect { target, .. } if *target == address), "{error}");
    let error = fill(&Target::Tcp(address), &Plan::redis(Target::Tcp(String::new())).protocol, |_| {}).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
}

/// Starts a server that answers everything with one line.
fn line_server(answer: &'static str) -> Target {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = Target::Tcp(listener.local_addr().unwrap().to_string());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            thread::spawn(move || {
                let mut out = stream.try_clone().unwrap();
                for line in BufReader::new(stream).lines() {
                    let Ok(line) = line else { return };
                    // One answer for each command: at the head of an array, in RESP.
                    if line.starts_with('*') && out.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    target
}

#[test]
fn error_replies_are_counted_and_told() {
    let target = line_server("-LOADING busy\r\n");
    let protocol = Plan::redis(target.clone()).protocol;
    let error = fill(&target, &protocol, |_| {}).unwrap_err();
    assert!(error.to_string().contains("-LOADING busy"), "{error}");

    let load = Load::start(Plan { protocol, ..plan(target) }).unwrap();
    wait_for("errors", || load.counters().snapshot().counts.errors > 50);
    load.stop();
    let finished = load.wait().unwrap();
    let counts = finished.summary.counts;
    assert_eq!(counts.errors, counts.requests);
    assert!(finished.complaints[0].contains("LOADING busy"), "{:?}", finished.complaints);
    assert!(finished.summary.blackout.duration_ns > 0, "errors are no answers");
}

#[test]
fn an_http_server_is_probed_on_connections_that_stay_open() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = Target::Tcp(listener.local_addr().unwrap().to_string());
    let requests = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&requests);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, seen) = (stream.unwrap(), Arc::clone(&seen));
            thread::spawn(move || {
                let mut out = stream.try_clone().unwrap();
                for line in BufReader::new(stream).lines() {
                    let Ok(line) = line else { return };
                    if line.is_empty() {
                        // Every tenth answer is an error.
                        let bad = seen.fetch_add(1, Ordering::SeqCst) % 10 == 9;
                        let status = if bad { "503 Busy" } else { "200 OK" };
                        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nhi");
                        if out.write_all(answer.as_bytes()).is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    let protocol = Protocol::Http { path: "/health".into() };
    let load = Load::start(Plan { protocol, pipeline: 1, idle: 2, ..plan(target) }).unwrap();
    let finished = load.wait().unwrap();
    let counts = finished.summary.counts;
    assert_eq!((counts.requests, counts.errors, counts.ok), (2000, 200, 1800), "{:?}", finished.complaints);
    assert_eq!((finished.end.dropped, finished.end.idle_alive), (0, 2));
    assert!(finished.complaints[0].contains("status 503"), "{:?}", finished.complaints);
}
