//! Cost of quiescence points, libstillpoint and applied patches for a server: memory and throughput.

use crate::results::{Section, number};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stillpoint_patch_bench::consumption::{cpu_us, memory};
use stillpoint_patch_bench::operation::{MODES, Operation, Spread};
use stillpoint_patch_tests::load::{Clients, Load};
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::series::Series;
use stillpoint_patch_tests::server::{Memcached, Redis, Server};

/// Connections, each with a thread that sends a batch, reads the answers, and sends the next.
const CONNECTIONS: usize = 4;
/// Pairs of a write and three reads in a batch.
const PAIRS: usize = 4;
const VALUE: &str = "0123456789abcdef0123456789abcdef";
const KEYS: u64 = 100_000;

/// A program, and the patches applied to its process before the measurement.
pub(crate) struct Variant {
    name: String,
    binary: Binary,
    patches: Vec<PathBuf>,
    mode: &'static str,
}

impl Variant {
    fn new(name: &str, binary: &Binary) -> Variant {
        Variant { name: name.into(), binary: binary.clone(), patches: Vec::new(), mode: "" }
    }

    fn patched(name: &str, binary: &Binary, patches: &[PathBuf], mode: &'static str) -> Variant {
        let name = format!("{name}, patched by `--quiescence {mode}`");
        Variant { name, binary: binary.clone(), patches: patches.into(), mode }
    }
}

/// Returns the variants: without points, without them and patched, with points, with points and patched in each mode,
/// and the program after a restart.
pub(crate) fn variants(
    plain: (&Binary, &[PathBuf]),
    points: (&Binary, &[PathBuf]),
    restarted: Option<&Binary>,
) -> Vec<Variant> {
    let mut all = vec![Variant::new("without points", plain.0)];
    if !plain.1.is_empty() {
        all.push(Variant::patched("without points", plain.0, plain.1, "probe"));
    }
    all.push(Variant::new("with points", points.0));
    all.extend(MODES.map(|mode| Variant::patched("with points", points.0, points.1, mode)));
    all.extend(restarted.map(|binary| Variant::new("without points, restarted as Debian's fixed program", binary)));
    all
}

/// Returns the patch files of a series.
pub(crate) fn files(series: &Series) -> Vec<PathBuf> {
    series.patches.iter().map(|patch| patch.file.clone()).collect()
}

#[derive(Clone, Copy)]
enum Kind {
    Redis,
    Memcached,
}

#[derive(Serialize)]
struct Row {
    server: &'static str,
    variant: String,
    patches: usize,
    requests_per_second: Spread,
    /// Processor time of all threads of the server for each request.
    cpu_us: Spread,
    pss_kib: Spread,
    rss_kib: Spread,
    private_kib: Spread,
    page_tables_kib: Spread,
}

/// One measurement of one process: by name, as in [`Row`].
type Measurement = BTreeMap<&'static str, f64>;

/// Measures each variant `rounds` times in turns, for `seconds`.
pub(crate) fn overhead(redis: &[Variant], memcached: &[Variant], rounds: usize, seconds: u64) -> Section {
    let title = format!(
        "Memory and throughput of servers with points, libstillpoint and patches: medians of {rounds} runs of {seconds} s in turns (smallest to largest)"
    );
    let columns = [
        "server",
        "program",
        "patches",
        "requests a second",
        "that, to the first",
        "processor time of a request, us",
        "Pss, MiB",
        "Rss, MiB",
        "private, MiB",
        "page tables, KiB",
    ];
    let mut section = Section::new("overhead", title, &columns);
    let mut rows = compared("redis", Kind::Redis, redis, rounds, seconds);
    rows.extend(compared("memcached", Kind::Memcached, memcached, rounds, seconds));
    let range =
        |s: &Spread, by: f64| format!("{} ({} to {})", number(s.median / by), number(s.min / by), number(s.max / by));
    for row in &rows {
        let first = rows.iter().find(|other| other.server == row.server).unwrap_or(row);
        section.rows.push(vec![
            row.server.into(),
            row.variant.clone(),
            row.patches.to_string(),
            range(&row.requests_per_second, 1.0),
            number(row.requests_per_second.median / first.requests_per_second.median),
            range(&row.cpu_us, 1.0),
            range(&row.pss_kib, 1024.0),
            range(&row.rss_kib, 1024.0),
            range(&row.private_kib, 1024.0),
            range(&row.page_tables_kib, 1.0),
        ]);
    }
    section.notes.push(format!(
        "{CONNECTIONS} clients of one connection each send 16 requests at once, a quarter of them writes, and the next 16 when all are answered; they share the processors with the server. Memory: with {KEYS} keys, before the load."
    ));
    section.raw(&rows);
    section
}

fn compared(server: &'static str, kind: Kind, variants: &[Variant], rounds: usize, seconds: u64) -> Vec<Row> {
    let mut measured: Vec<Vec<Measurement>> = variants.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        // Forward and backward: changes over time affect all variants equally.
        let order: Vec<usize> =
            if round % 2 == 0 { (0..variants.len()).collect() } else { (0..variants.len()).rev().collect() };
        for at in order {
            measured[at].push(once(kind, &variants[at], seconds));
        }
    }
    let row = |(variant, runs): (&Variant, Vec<Measurement>)| {
        let spread = |name: &str| Spread::of(runs.iter().map(|run| run[name]).collect());
        Row {
            server,
            variant: variant.name.clone(),
            patches: variant.patches.len(),
            requests_per_second: spread("rate"),
            cpu_us: spread("cpu"),
            pss_kib: spread("Pss"),
            rss_kib: spread("Rss"),
            private_kib: spread("Private"),
            page_tables_kib: spread("VmPTE"),
        }
    };
    variants.iter().zip(measured).map(row).collect()
}

fn once(kind: Kind, variant: &Variant, seconds: u64) -> Measurement {
    match kind {
        Kind::Redis => measure(kind, &Redis::start(&variant.binary, &[]), variant, seconds),
        Kind::Memcached => measure(kind, &Memcached::start(&variant.binary, &["-t", "4"]), variant, seconds),
    }
}

fn measure(kind: Kind, server: &Server, variant: &Variant, seconds: u64) -> Measurement {
    let protocol = match kind {
        Kind::Redis => "redis",
        Kind::Memcached => "memcached",
    };
    Load::fill(server.port(), &Clients { protocol, keys: KEYS, ..Clients::default() });
    for patch in &variant.patches {
        Operation::of(patch_calls::apply(patch, server.pid()).args(["--quiescence", variant.mode])).succeeded();
    }
    std::thread::sleep(Duration::from_millis(500));
    let memory = memory(&[server.pid()]);
    let pressure = UnpacedClients::start(kind, server.port());
    std::thread::sleep(Duration::from_millis(500));
    let (began, requests, cpu) = (Instant::now(), pressure.answered(), cpu_us(&[server.pid()]));
    std::thread::sleep(Duration::from_secs(seconds));
    let (took, requests, cpu) =
        (began.elapsed().as_secs_f64(), (pressure.answered() - requests) as f64, cpu_us(&[server.pid()]) - cpu);
    pressure.end();
    Measurement::from([
        ("rate", requests / took),
        ("cpu", cpu / requests),
        ("Pss", memory.pss),
        ("Rss", memory.rss),
        ("Private", memory.private),
        ("VmPTE", memory.page_tables),
    ])
}

/// Clients without pauses.
struct UnpacedClients {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl UnpacedClients {
    fn start(kind: Kind, port: u16) -> UnpacedClients {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let one = |number| {
            let (stop, answered) = (Arc::clone(&stop), Arc::clone(&answered));
            std::thread::spawn(move || press(kind, port, number, &stop, &answered))
        };
        let threads = (0..CONNECTIONS).map(one).collect();
        UnpacedClients { stop, answered, threads }
    }

    fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("every answer is right"));
    }
}

fn press(kind: Kind, port: u16, number: usize, stop: &AtomicBool, answered: &AtomicU64) {
    let (batch, right) = batch(kind, number);
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("connect");
    stream.set_nodelay(true).expect("send at once");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set a limit");
    let mut answer = vec![0; right.len()];
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(batch.as_bytes()).expect("send");
        stream.read_exact(&mut answer).expect("be answered");
        assert_eq!(String::from_utf8_lossy(&answer), right);
        answered.fetch_add(4 * PAIRS as u64, Ordering::Relaxed);
    }
}

/// Returns requests, and the expected answers.
fn batch(kind: Kind, number: usize) -> (String, String) {
    let (mut batch, mut right) = (String::new(), String::new());
    let length = VALUE.len();
    for pair in 0..PAIRS {
        let key = format!("pressure:{number}:{pair}");
        let (write, written, read, value) = match kind {
            Kind::Redis => {
                let bulk = |word: &str| format!("${}\r\n{word}\r\n", word.len());
                let (write, read) = (["SET", &key, VALUE].map(bulk).concat(), ["GET", &key].map(bulk).concat());
                (format!("*3\r\n{write}"), "+OK\r\n".into(), format!("*2\r\n{read}"), bulk(VALUE))
            }
            Kind::Memcached => (
                format!("set {key} 0 0 {length}\r\n{VALUE}\r\n"),
                "STORED\r\n".to_owned(),
                format!("get {key}\r\n"),
                format!("VALUE {key} 0 {length}\r\n{VALUE}\r\nEND\r\n"),
            ),
        };
        batch += &(write + &read.repeat(3));
        right += &(written + &value.repeat(3));
    }
    (batch, right)
}
