//! Comparison of our page server and lazy-pages daemon with criu's own: the same redis, the same criu, the same memory
//! for images, in turns. Prints tables.

mod restored_throughput;

use serde_json::Value;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_patch_tests::checkpointed_server::{CheckpointedServer, criu};
use stillpoint_patch_tests::cli::{self, Run, Stillpoint};
use stillpoint_patch_tests::packages;
use stillpoint_patch_tests::resp::Client;
use stillpoint_patch_tests::server::free_port;
use stillpoint_patch_tests::wait;
use tempfile::TempDir;

/// Result of one run of one tool.
#[derive(Debug, Clone, Copy)]
struct RunFigures {
    /// Duration of the checkpoint command.
    checkpoint: Duration,
    /// Time in it for which redis was stopped, by criu's own count.
    frozen: Duration,
    /// Size of the files of pages on disk.
    bytes: u64,
    /// Time from the start of the restore command to the first answer on the old connection. The request is sent when
    /// criu reports that the processes run: our command then still wakes peers, for a sixth of a second.
    first: Duration,
    /// Time from that answer until all memory is resident.
    rest: Duration,
    /// Number of pages in the image.
    pages: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RestoreMethod {
    Criu,
    Ours,
    OursWithPasses,
    OursComparedBefore,
}

impl RestoreMethod {
    const ALL: [RestoreMethod; 4] =
        [RestoreMethod::Criu, RestoreMethod::Ours, RestoreMethod::OursWithPasses, RestoreMethod::OursComparedBefore];

    fn name(self) -> &'static str {
        match self {
            RestoreMethod::Criu => "criu page-server, criu lazy-pages",
            RestoreMethod::Ours => "stillpoint, one pass",
            RestoreMethod::OursWithPasses => "stillpoint, passes before the freeze",
            RestoreMethod::OursComparedBefore => "the same, all sums compared before anything runs",
        }
    }
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse().expect("usage: kernel-rivals [MIB [ROUNDS]]"));
    let (mib, rounds): (u64, u64) = (numbers.next().unwrap_or(1024), numbers.next().unwrap_or(3));
    let criu = criu().as_ref().unwrap_or_else(|why| panic!("{why}"));
    let mut all: Vec<(RestoreMethod, RunFigures)> = Vec::new();
    for round in 0..rounds {
        for way in RestoreMethod::ALL {
            all.push((way, once(way, criu, mib)));
            eprintln!("round {}: {}: {:?}", round + 1, way.name(), all.last().map(|(_, figures)| *figures));
        }
    }
    println!("redis with {mib} MiB of values, {rounds} rounds in turns; medians (smallest to largest).\n");
    println!(
        "| | checkpoint, ms | redis stood, ms | written, MiB | first answer, ms | the rest, ms | pages a second |"
    );
    println!("|---|---|---|---|---|---|---|");
    for way in RestoreMethod::ALL {
        let of = |value: &dyn Fn(&RunFigures) -> f64| {
            let values = all.iter().filter(|(found, _)| *found == way).map(|(_, f)| value(f));
            let (median, least, most) = spread(values.collect());
            format!("{median:.0} ({least:.0} to {most:.0})")
        };
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        println!(
            "| {} | {} | {} | {} | {} | {} | {} |",
            way.name(),
            of(&|f| ms(f.checkpoint)),
            of(&|f| ms(f.frozen)),
            of(&|f| f.bytes as f64 / (1 << 20) as f64),
            of(&|f| ms(f.first)),
            of(&|f| ms(f.rest)),
            of(&|f| f.pages as f64 / (f.first + f.rest).as_secs_f64()),
        );
    }
    restored_throughput::table(criu, mib, rounds);
}

/// Returns the median, the smallest and the largest.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

/// Checkpoints a new redis and restores it.
fn once(way: RestoreMethod, criu: &Path, mib: u64) -> RunFigures {
    let binary = packages::redis(None).unwrap_or_else(|why| panic!("{why}"));
    let (dir, port) = (TempDir::new().expect("a directory"), free_port());
    let words = ["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--enable-debug-command", "yes"];
    let mut redis = CheckpointedServer::start(&binary, &words.map(OsString::from), dir.path());
    let mut client = wait::until("redis to listen", || Client::connect(port).ok());
    let keys = (mib << 20) / 1100;
    client.command(&["DEBUG", "POPULATE", &keys.to_string(), "key", "1000"]).expect("redis answers");
    let digest = client.command(&["DEBUG", "DIGEST"]).expect("redis answers").text().to_owned();
    let figures = match way {
        RestoreMethod::Criu => by_criu(criu, &mut redis, &mut client),
        RestoreMethod::Ours => by_us(criu, &mut redis, &mut client, "0", &[ON_DEMAND]),
        RestoreMethod::OursWithPasses => by_us(criu, &mut redis, &mut client, "4", &[ON_DEMAND]),
        RestoreMethod::OursComparedBefore => by_us(criu, &mut redis, &mut client, "4", &[]),
    };
    let after = client.command(&["DEBUG", "DIGEST"]).expect("redis answers").text().to_owned();
    assert_eq!(after, digest, "{way:?}");
    figures
}

/// Option to verify each page when it is fetched; criu verifies none.
const ON_DEMAND: &str = "--verify-on-demand";

fn by_us(criu: &Path, redis: &mut CheckpointedServer, client: &mut Client, passes: &str, how: &[&str]) -> RunFigures {
    let image = redis.images().join("image");
    let kernel =
        |verb: &str| Stillpoint::new().json().args(["kernel", verb, "--criu"]).arg(criu).arg("--image").arg(&image);
    let begun = Instant::now();
    let taken = succeeded(kernel("checkpoint").args(["--passes", passes, "--pid"]).arg(redis.pid()).run());
    let checkpoint = begun.elapsed();
    redis.until_gone();
    let begun = Instant::now();
    let mut restore = Command::new(cli::binary());
    restore.args(["--json", "kernel", "restore", "--fill-rate", "0", "--criu"]).arg(criu).arg("--image").arg(&image);
    let mut restore = restore.args(how).stdout(Stdio::piped()).spawn().expect("start the restore");
    let lines = BufReader::new(restore.stdout.take().expect("its output is ours")).lines();
    let (mut first, mut restored) = (None, Vec::new());
    for line in lines {
        let line: Value = serde_json::from_str(&line.expect("read what it says")).expect("JSON");
        if line["event"] == "phase-ended" && line["phase"] == "restore" {
            ping(client);
            first = Some(begun.elapsed());
        }
        restored.push(line);
    }
    let status = restore.wait().expect("wait for the restore");
    assert!(status.success(), "{status}: {restored:?}");
    let first = first.expect("it restores");
    let keeper = number(&restored, "restored", "keeper");
    wait::until("all memory to come", || has_ended(keeper).then_some(()));
    let rest = begun.elapsed() - first;
    RunFigures {
        checkpoint,
        frozen: frozen(&image),
        bytes: stored(&image, "foam-"),
        first,
        rest,
        pages: number(&lines_of(&taken), "checkpointed", "pages"),
    }
}

/// Returns true if a process has ended: the process that adopts orphans may wait for them only seconds later.
fn has_ended(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

fn by_criu(criu: &Path, redis: &mut CheckpointedServer, client: &mut Client) -> RunFigures {
    let image = redis.images().join("image");
    std::fs::create_dir(&image).expect("make a directory");
    let port = free_port().to_string();
    let start = |verb: &str, more: &[&str]| start(criu, &image, verb, more);
    let server = start("page-server", &["--port", &port]);
    wait::until("criu's page server", || listens(&port));
    let pid = redis.pid().to_string();
    let network = ["--tcp-established", "--shell-job", "--network-lock", "nftables"];
    let begun = Instant::now();
    let to = ["-t", &pid, "--page-server", "--address", "127.0.0.1", "--port", &port];
    ended(start("dump", &[&to[..], &network].concat()), &image.join("dump.log"));
    let checkpoint = begun.elapsed();
    ended(server, &image.join("page-server.log"));
    redis.until_gone();
    let begun = Instant::now();
    let mut daemon = start("lazy-pages", &[]);
    wait::until("criu's daemon", || image.join("lazy-pages.socket").exists().then_some(()));
    ended(start("restore", &["-d", "--lazy-pages", "--tcp-established", "--shell-job"]), &image.join("restore.log"));
    ping(client);
    let first = begun.elapsed();
    assert!(daemon.wait().expect("wait for criu").success(), "see {}", image.join("lazy-pages.log").display());
    let rest = begun.elapsed() - first;
    let bytes = stored(&image, "pages-");
    RunFigures { checkpoint, frozen: frozen(&image), bytes, first, rest, pages: bytes / 4096 }
}

/// Starts criu by itself, with its images in a directory.
fn start(criu: &Path, image: &Path, verb: &str, more: &[&str]) -> Child {
    let mut command = Command::new(criu);
    command.arg(verb).arg("-D").arg(image).args(["-o", &format!("{verb}.log")]).args(more);
    command.stdin(Stdio::null()).spawn().expect("start criu")
}

/// Returns the time for which the processes were stopped, from criu's `stats-dump`: two magics, a length, and a message
/// whose first field is a message with this time in its second field.
fn frozen(image: &Path) -> Duration {
    let bytes = std::fs::read(image.join("stats-dump")).expect("criu leaves its counts");
    let mut rest = &bytes[12..];
    let (_, _) = (varint(&mut rest), varint(&mut rest));
    while !rest.is_empty() {
        let (key, value) = (varint(&mut rest), varint(&mut rest));
        if key == 2 << 3 {
            return Duration::from_micros(value);
        }
    }
    panic!("criu did not count how long it froze")
}

fn varint(rest: &mut &[u8]) -> u64 {
    let length = rest.iter().position(|byte| byte & 0x80 == 0).map_or(rest.len(), |last| last + 1);
    let (number, after) = rest.split_at(length);
    *rest = after;
    number.iter().rev().fold(0, |all, byte| all << 7 | u64::from(byte & 0x7f))
}

fn ping(client: &mut Client) {
    assert_eq!(client.command(&["PING"]).expect("the same connection").text(), "PONG");
}

fn listens(port: &str) -> Option<()> {
    // the dump would include a test connection: the kernel's table shows the listener as well
    let table = std::fs::read_to_string("/proc/net/tcp").ok()? + &std::fs::read_to_string("/proc/net/tcp6").ok()?;
    let local = format!(":{:04X} ", port.parse::<u16>().ok()?);
    table.lines().any(|line| line.contains(&local) && line.contains(" 0A ")).then_some(())
}

fn ended(mut child: Child, log: &Path) {
    let status = child.wait().expect("wait for criu");
    let said = || std::fs::read_to_string(log).unwrap_or_default();
    assert!(status.success(), "criu ended with {status}: {}", said());
}

fn succeeded(run: Run) -> Run {
    assert_eq!(run.code, Some(0), "{run}");
    run
}

fn lines_of(run: &Run) -> Vec<Value> {
    run.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn number(lines: &[Value], event: &str, field: &str) -> u64 {
    let found = lines.iter().find(|line| line["event"] == event).and_then(|line| line[field].as_u64());
    found.unwrap_or_else(|| panic!("no {field} of {event} in {lines:?}"))
}

/// Returns the size of files on disk: sparse ones are longer than that.
fn stored(dir: &Path, prefix: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files: Vec<PathBuf> = std::fs::read_dir(dir).expect("list").flatten().map(|entry| entry.path()).collect();
    let named = |path: &&PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    files.iter().filter(named).filter_map(|path| path.metadata().ok()).map(|file| file.blocks() * 512).sum()
}
