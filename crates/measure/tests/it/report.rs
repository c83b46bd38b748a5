//! Tests of the report with made-up runs whose figures are known.

use proptest::prelude::*;
use stillpoint_events::{Event, EventKind, kernel, patch};
use stillpoint_measure::Error;
use stillpoint_measure::record::{End, Header, Mark, MarkKind, Outcome, Record, Sample};
use stillpoint_measure::report::Report;
use stillpoint_measure::timeline::Timeline;

const MS: u64 = 1_000_000;
const START: u64 = 1_000_000 * MS;

fn header() -> Header {
    Header {
        protocol: "redis".into(),
        target: "<server>".into(),
        started_ns: START,
        started_unix_s: 0,
        kinds: vec!["get".into(), "set".into()],
        rate: 1_000.0,
        arrivals: "constant".into(),
        connections: 3,
        idle: 0,
        blocking: 0,
        pipeline: 16,
        keys: 10,
        value_bytes: 64,
    }
}

/// Makes a record: one request each millisecond for 20 s, each answered after 100 us; those due from 8 to 8.05 s all at 8.05 s.
fn record() -> Record {
    let sample = |n: u64| {
        let due = START + n * MS;
        let pause_end = START + 8_050 * MS;
        let latency_ns = if (8_000..8_050).contains(&n) { pause_end - due } else { MS / 10 };
        let connection = (n % 3) as u32;
        Sample { scheduled_ns: due, latency_ns, late_us: 3, connection, kind: (n % 2) as u8, outcome: Outcome::Ok }
    };
    let samples = (0..20_000).map(sample).collect();
    let end = End { ended_ns: START + 20_000 * MS, ..End::default() };
    Record { header: header(), samples, marks: Vec::new(), end: Some(end) }
}

fn apply(from_ms: u64, to_ms: u64, active: &[&str]) -> Vec<Event> {
    let event = |ms: u64, kind| Event::new(START + ms * MS, Some(5), kind);
    let active = active.iter().map(|&name| name.to_owned()).collect();
    let (operation, phase) = (String::from("apply"), String::from("check"));
    vec![
        event(from_ms, EventKind::PhaseStarted { operation: operation.clone(), phase: phase.clone() }),
        event(from_ms + 2, EventKind::PhaseEnded { operation, phase, duration_ns: 2 * MS }),
        event(
            from_ms + 5,
            EventKind::Patch(patch::Event::ThreadStopped { tid: 5, reason: "probe".into(), stopped_ns: 11_000 }),
        ),
        event(
            to_ms,
            EventKind::Patch(patch::Event::Committed { transition: 1, active, duration_ns: 7 * MS, threads: 4 }),
        ),
    ]
}

fn run() -> Report {
    let mut events = apply(3_000, 3_010, &["a"]);
    // Ends in the middle of the pause.
    events.extend(apply(7_990, 8_020, &["a", "b"]));
    Report::of(vec![record()], Timeline::of(events)).unwrap()
}

#[test]
fn each_request_belongs_to_the_window_in_which_it_was_under_way() {
    let report = run();
    let [first, second] = &report.operations[..] else { panic!("{:?}", report.operations) };
    // Due at 3000, 3001, ... 3010 ms.
    assert_eq!(first.during.counts.requests, 11);
    assert_eq!(first.before.counts.requests, 2_999, "those of the first three seconds but the very first");
    assert_eq!(first.after.counts.requests, 4_979, "from 3011 to 7989 ms");
    assert_eq!(second.before.counts.requests, 4_979, "from 3011 to 7989 ms");
    assert_eq!(second.during.counts.requests, 31);
    // Later requests of the pause were not in progress during the operation.
    assert_eq!(second.after.counts.requests, 4_999, "due and answered within five seconds");
    assert_eq!(second.after.latency.max_ns, 29 * MS);
    assert_eq!(second.during.latency.max_ns, 50 * MS);
    let all = report.during.counts.requests + report.outside.counts.requests;
    assert_eq!((report.during.counts.requests, all), (42, 20_000));
}

#[test]
fn an_operation_is_charged_with_the_whole_blackout() {
    let report = run();
    assert_eq!(report.summary.blackout.duration_ns, 50 * MS);
    assert_eq!(report.operations[1].during.blackout_ns, 50 * MS);
    assert_eq!(report.during.blackout_ns, 50 * MS);
    assert_eq!(report.outside.blackout_ns, MS / 10);
    assert_eq!(report.operations[0].during.blackout_ns, MS / 10);
    assert_eq!(report.operations[1].by_phase[0].during.blackout_ns, MS / 10, "over before the pause began");
}

#[test]
fn figures_of_the_engine_are_taken_over() {
    let report = run();
    let second = &report.operations[1];
    assert_eq!((second.stop.count, second.stop.max_ns, second.operation.threads), (1, 11_000, 4));
    assert_eq!(second.operation.migration_ns, Some(7 * MS));
    assert_eq!(second.operation.patches, ["b"]);
    assert_eq!(report.migration.count, 2);
    assert!(report.is_clean());
}

#[test]
fn the_page_shows_failures_and_escapes_names() {
    let mut record = record();
    record.samples[500].outcome = Outcome::WrongAnswer;
    record.marks.push(Mark { t_ns: START, connection: 1, what: MarkKind::Dropped, text: "<reset>".into() });
    let report = Report::of(vec![record], Timeline::of(apply(100, 120, &["<x>"]))).unwrap();
    assert!(!report.is_clean());
    let html = report.html();
    assert!(html.contains("1 failed, 1 connections dropped while 1 change was made"), "{}", &html[..4000]);
    for raw in ["<x>", "<reset>", "<server>", "NaN", "inf"] {
        assert!(!html.replace("info", "").contains(raw), "{raw}");
    }
    assert!(html.contains("&lt;reset&gt;") && html.contains("class=\"cross\""));
    balanced(&html);
}

/// Makes the events of phases one after another, and of the operation's end.
fn switch(name: &str, from_ms: u64, phases: &[&str], ending: EventKind) -> Vec<Event> {
    let mut events = Vec::new();
    let mut at = START + from_ms * MS;
    for phase in phases {
        let (operation, phase) = (name.to_owned(), phase.to_string());
        let begin = EventKind::PhaseStarted { operation: operation.clone(), phase: phase.clone() };
        events.push(Event::new(at, None, begin));
        at += MS;
        events.push(Event::new(at, None, EventKind::PhaseEnded { operation, phase, duration_ns: MS }));
    }
    events.push(Event::new(at, None, ending));
    events
}

#[test]
fn another_kernel_is_told_of_in_its_own_words() {
    let back = EventKind::FellBack { transition: None, reason: "it panicked".into() };
    let through = EventKind::Kernel(kernel::Event::KernelChanged { release: "6.12".into(), duration_ns: MS });
    let mut events = switch("switch", 100, &["freeze", "jump", "boot", "fill"], through);
    events.extend(switch("switch back", 120, &["freeze", "jump", "boot", "jump again", "boot again", "fill"], back));
    let html = Report::of(vec![record()], Timeline::of(events)).unwrap().html();
    assert!(html.contains("changed to another kernel once, and went back to the old one by itself once"), "{html}");
    for words in ["running code", "a thread was stopped", "to full", "operations / otherwise"] {
        assert!(!html.contains(words), "{words}: {html}");
    }
    // a phase that only one of them has is inserted at its place
    let rows = ["freeze", "jump", "boot", "jump again", "boot again", "fill", "<b>blackout</b>"];
    let places: Vec<usize> = rows.map(|row| html.find(&format!("<td class=\"l\">{row}</td>")).unwrap()).to_vec();
    assert!(places.is_sorted(), "{places:?}");
    balanced(&html);
}

#[test]
fn a_run_without_operations_and_a_record_that_is_cut_off_are_shown() {
    let report = Report::of(vec![Record { end: None, ..record() }], Timeline::default()).unwrap();
    let html = report.html();
    assert!(html.contains("did not end in order") && !html.contains("Each operation"));
    assert_eq!(report.p999_ratio(), None);
    balanced(&html);
}

#[test]
fn several_records_are_one_run() {
    let report = Report::of(vec![record(), record()], Timeline::default()).unwrap();
    assert_eq!(report.summary.counts.requests, 40_000);
    let kinds: Vec<_> = report.summary.kinds.iter().map(|kind| kind.kind.as_str()).collect();
    assert_eq!(kinds, ["1: get", "1: set", "2: get", "2: set"]);
}

#[test]
fn events_of_another_time_and_empty_records_are_refused() {
    let elsewhere = apply(500_000, 500_010, &["a"]);
    assert!(matches!(Report::of(vec![record()], Timeline::of(elsewhere)), Err(Error::Mismatch(_))));
    assert!(matches!(Report::of(Vec::new(), Timeline::default()), Err(Error::Mismatch(_))));
    let empty = Record { samples: Vec::new(), ..record() };
    assert!(matches!(Report::of(vec![empty], Timeline::default()), Err(Error::Mismatch(_))));
}

/// Checks that every element that is opened is closed, in order.
fn balanced(html: &str) {
    const VOID: [&str; 3] = ["meta", "br", "!doctype"];
    let mut open: Vec<&str> = Vec::new();
    // Angle brackets are only around tags: names are escaped, the style has none.
    for tag in html.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        let name = tag.trim_start_matches('/').split([' ', '/', '\n']).next().unwrap_or_default();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "</{name}> closes something else");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert_eq!(open, Vec::<&str>::new());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_run_makes_a_page(
        raw in proptest::collection::vec((0u64..3_000_000_000, 0u64..5_000_000_000, 0usize..5), 1..200),
        spans in proptest::collection::vec((0u64..3_000, 0u64..500), 0..6),
    ) {
        let sample = |&(due, latency_ns, outcome): &(u64, u64, usize)| Sample {
            scheduled_ns: START + due,
            latency_ns,
            late_us: 0,
            connection: 0,
            kind: 0,
            outcome: Outcome::ALL[outcome],
        };
        let samples: Vec<_> = raw.iter().map(sample).collect();
        let record = Record { header: header(), samples, marks: Vec::new(), end: None };
        let events = spans.iter().flat_map(|&(from, length)| apply(from, from + length + 6, &["p"])).collect();
        // A report is refused if all operations are outside the record.
        if let Ok(report) = Report::of(vec![record], Timeline::of(events)) {
            let html = report.html();
            prop_assert!(!html.contains("NaN"));
            balanced(&html);
            prop_assert_eq!(report.during.counts.requests + report.outside.counts.requests, raw.len() as u64);
        }
    }
}
