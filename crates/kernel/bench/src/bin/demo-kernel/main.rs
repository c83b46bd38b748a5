//! `make demo-kernel`: an emulated machine with redis, memcached and MariaDB as Debian ships them, clients outside of
//! it, and another kernel below all of them: first one that panics, then a restore that fails, then a switch that
//! succeeds. A table and `report.html` show the effect on the clients.
//!
//! It runs the `stillpoint` binary (`STILLPOINT_BIN`) in the machine as a user would. It ends with code 1 when a
//! request was lost or had its effect twice, when a connection was reset, or when a key is missing.
#![forbid(unsafe_code)]

mod record;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind, kernel};
use stillpoint_measure::report::Report;
use stillpoint_measure::timeline::Timeline;
use stillpoint_testing::machine::clients::{
    CountingClient, TimedRequest, append, longest, prepare_mariadb, prepare_units, read_pairs, store_pairs, switch,
    wait_until_done,
};
use stillpoint_testing::machine::{Guest, Machine};

const UNITS: [&str; 3] = ["mariadb", "memcached", "redis-server"];
/// Time between two requests of one client: all of them share two emulated processors.
const REQUEST_INTERVAL: Duration = Duration::from_millis(500);
/// Time before, between and after the switches.
const SWITCH_PAUSE: Duration = Duration::from_secs(5);

/// Size of the demonstration; `--short` is for a quick look.
struct Size {
    clients: usize,
    keys: u32,
    faults: &'static [(&'static str, &'static str)],
}

const FAULTS: [(&str, &str); 2] = [
    ("switch to a kernel that panics", "stillpoint.initrd=panic"),
    ("switch with a restore that fails", "stillpoint.fault=restore"),
];
const FULL: Size = Size { clients: 17, keys: 20_000, faults: &FAULTS };
const SHORT: Size = Size { clients: 3, keys: 2000, faults: &[] };

/// One switch, as observed from outside.
struct ObservedSwitch {
    what: String,
    began: Instant,
    ended: Instant,
    journal: serde_json::Value,
}

fn main() -> ExitCode {
    let short = std::env::args().any(|argument| argument == "--short");
    let Some(tool) = std::env::var_os("STILLPOINT_BIN").map(PathBuf::from) else {
        eprintln!("error: STILLPOINT_BIN does not name the binary; `make demo-kernel` sets it");
        return ExitCode::from(2);
    };
    let guest = match Guest::build() {
        Ok(guest) => guest,
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::from(3);
        }
    };
    demonstrate(&guest, &tool, if short { &SHORT } else { &FULL });
    ExitCode::SUCCESS
}

/// Runs the demonstration; every violation ends it with a panic, and the process with a code.
fn demonstrate(guest: &Guest, tool: &Path, size: &Size) {
    let begun = Instant::now();
    let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
    let mut machine = Machine::boot(guest, from, tool);
    println!("an emulated machine, up after {:.0} s, kernel {from}", begun.elapsed().as_secs_f64());
    prepare_units(&mut machine, &UNITS);
    prepare_mariadb(&mut machine);
    println!(
        "\n$ stillpoint kernel dropin redis-server\n{}",
        machine.succeed("cat /etc/systemd/system/redis-server.service.d/*")
    );
    let mut client = machine.client(6379);
    store_pairs(&mut client, size.keys);
    let pulses = CountingClient::of_all(&machine, &UNITS, size.clients, REQUEST_INTERVAL);
    println!("\n{} clients outside, one connection each; {} keys", pulses.len() + 1, size.keys);
    println!(
        "\n$ stillpoint kernel switch --to {to} --dry-run\n{}",
        machine.succeed(&format!("stillpoint kernel switch --to {to} --dry-run"))
    );
    std::thread::sleep(SWITCH_PAUSE);
    let mut all = Vec::new();
    for (what, fault) in size.faults {
        append(&mut machine, fault);
        all.push(run_switch(&mut machine, what, to, from));
        read_pairs(&mut client, size.keys);
        std::thread::sleep(SWITCH_PAUSE);
    }
    append(&mut machine, "");
    all.push(run_switch(&mut machine, "switch", to, to));
    read_pairs(&mut client, size.keys);
    std::thread::sleep(SWITCH_PAUSE);
    let beats: Vec<(u8, Vec<TimedRequest>)> = pulses.into_iter().map(|(kind, pulse)| (kind, pulse.end())).collect();
    report(&all, &beats);
}

/// Makes one switch; it ends on the kernel `on`.
fn run_switch(machine: &mut Machine, what: &str, to: &str, on: &str) -> ObservedSwitch {
    println!("\n# {what}\n$ stillpoint kernel switch --to {to}");
    let began = Instant::now();
    switch(machine, to, on);
    let text = wait_until_done(machine);
    let journal: serde_json::Value = serde_json::from_str(&text).expect("a journal");
    for timing in journal["timings"].as_array().into_iter().flatten() {
        let took = timing["duration_us"].as_f64().unwrap_or(0.0) / 1e3;
        println!(
            "  {:28} {:10} {took:>9.0} ms",
            timing["kernel"].as_str().unwrap_or(""),
            timing["phase"].as_str().unwrap_or("")
        );
    }
    if let Some(why) = journal["why"].as_str() {
        println!("  fell back: {why}");
    }
    println!("  the units run on {}", machine.succeed("uname -r"));
    println!("  connections whose ends were informed at once: {}", journal["woken"]["Ok"]);
    ObservedSwitch { what: what.to_owned(), began, ended: Instant::now(), journal }
}

/// Prints the table and writes the page.
fn report(all: &[ObservedSwitch], beats: &[(u8, Vec<TimedRequest>)]) {
    let requests: usize = beats.iter().map(|(_, beats)| beats.len()).sum();
    println!("\n  connections {:>6}   0 reset", beats.len());
    println!("  requests {:>9}   each had its effect exactly once", requests);
    for observed in all {
        let within = |beat: &&TimedRequest| beat.sent + beat.latency >= observed.began && beat.sent <= observed.ended;
        let during: Vec<TimedRequest> =
            beats.iter().flat_map(|(_, beats)| beats.iter().filter(within).copied()).collect();
        println!("  {:32} blackout {:.1} s", observed.what, longest(&during).as_secs_f64());
    }
    let clock = record::Clock::now();
    let events = all.iter().flat_map(|observed| events(observed, &clock)).collect();
    let page = Path::new("target/demo/kernel.html");
    match Report::of(vec![record::of_requests(beats, &clock)], Timeline::of(events)) {
        Ok(report) => {
            fs::create_dir_all("target/demo").and_then(|()| fs::write(page, report.html())).expect("write the page");
            println!("  latency over time, with the switches: {}", page.display());
        }
        Err(error) => println!("  no page: {error}"),
    }
}

/// Returns a switch as an operation of a timeline: from the command until the images are removed.
fn events(observed: &ObservedSwitch, clock: &record::Clock) -> Vec<Event> {
    let (operation, ended_ns) = (observed.what.clone(), clock.ns(observed.ended));
    let mut events = Vec::new();
    for Span { name, from_ns, to_ns } in spans(observed, clock.ns(observed.began)) {
        let begin = EventKind::PhaseStarted { operation: operation.clone(), phase: name.clone() };
        let duration_ns = to_ns - from_ns;
        events.push(Event::new(from_ns, None, begin));
        events.push(Event::new(
            to_ns,
            None,
            EventKind::PhaseEnded { operation: operation.clone(), phase: name, duration_ns },
        ));
    }
    let end = match observed.journal["why"].as_str() {
        Some(reason) => EventKind::FellBack { transition: None, reason: reason.to_owned() },
        None => EventKind::Kernel(kernel::Event::KernelChanged {
            release: observed.journal["to"].as_str().unwrap_or("another kernel").to_owned(),
            duration_ns: (observed.ended - observed.began).as_nanos() as u64,
        }),
    };
    events.push(Event::new(ended_ns, None, end));
    events
}

/// A phase with its start and end.
struct Span {
    name: String,
    from_ns: u64,
    to_ns: u64,
}

/// Returns the phases of the journal, and between the two kernels the kexec, which no kernel can record.
fn spans(observed: &ObservedSwitch, began_ns: u64) -> Vec<Span> {
    let (mut spans, mut before): (Vec<Span>, _) = (Vec::new(), None);
    let mut add = |name: &str, from_ns: u64, to_ns: u64| {
        // one after another, even if the clocks of the two kernels disagree
        let from_ns = from_ns.max(spans.last().map_or(began_ns, |last| last.to_ns));
        let mut name = name.to_owned();
        while spans.iter().any(|span| span.name == name) {
            name += " again";
        }
        spans.push(Span { name, from_ns, to_ns: to_ns.max(from_ns) });
    };
    for timing in observed.journal["timings"].as_array().into_iter().flatten() {
        let number = |key: &str| timing[key].as_u64().unwrap_or(0) * 1000;
        let (to_ns, duration_ns, name) =
            (number("ended_unix_us"), number("duration_us"), timing["phase"].as_str().unwrap_or("?"));
        let from_ns = to_ns.saturating_sub(duration_ns);
        if let Some(before_ns) = before.filter(|_| name == "boot") {
            add("jump", before_ns, from_ns);
        }
        add(name, from_ns, to_ns);
        before = Some(to_ns);
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_back_has_two_jumps() {
        let timing = |phase: &str, ended: u64, took: u64| serde_json::json!({"phase": phase, "ended_unix_us": ended, "duration_us": took});
        let timings =
            [timing("freeze", 100, 10), timing("boot", 170, 50), timing("boot", 250, 40), timing("restore", 260, 10)];
        let journal = serde_json::json!({ "timings": timings });
        let now = Instant::now();
        let observed = ObservedSwitch { what: "switch".into(), began: now, ended: now, journal };
        let spans: Vec<_> =
            spans(&observed, 95_000).into_iter().map(|span| (span.name, span.from_ns, span.to_ns)).collect();
        let expected = [
            ("freeze", 95, 100),
            ("jump", 100, 120),
            ("boot", 120, 170),
            ("jump again", 170, 210),
            ("boot again", 210, 250),
            ("restore", 250, 260),
        ];
        assert_eq!(spans, expected.map(|(name, from, to)| (name.to_owned(), from * 1000, to * 1000)));
    }
}
