//! Two servers on processors of their own, the proxy, emulated browsers, and a migration.

use crate::series::Answers;
use rustix::process::Signal;
use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stillpoint_events::{EventKind, migrate};
use stillpoint_measure::postgres::{PostgresLoad, PostgresPlan, Work, prepare};
use stillpoint_measure::record::Record;
use stillpoint_migrate_bench::processors::{pin, processors};
use stillpoint_migrate_tests::{CommandResult, Testbed};
use stillpoint_testing::postgresql::Cluster;

/// Default settings, with memory for this machine.
const SETTINGS: [&str; 5] =
    ["wal_level=logical", "fsync=on", "shared_buffers=256MB", "max_wal_size=2GB", "max_connections=500"];
/// Think time of each browser between two interactions, on average.
const THINK: Duration = Duration::from_millis(200);
/// Browsers with which the source's capacity is measured: about as many as there will be. With few browsers the
/// capacity is twice that with hundreds.
const CAPACITY_BROWSERS: u32 = 250;
/// Most browsers of one tenant.
const BROWSERS_MAX: u32 = 350;
/// Time after which a migration is aborted.
const WAIT_TIMEOUT: Duration = Duration::from_secs(420);

/// All parts of a measurement.
pub(crate) struct Bench {
    pub(crate) testbed: Testbed,
    records: tempfile::TempDir,
}

/// Browsers at work.
pub(crate) struct Browsers {
    load: PostgresLoad,
    record: PathBuf,
}

/// A migration, with its beginning and end by the clock of records.
pub(crate) struct Migration {
    ended: CommandResult,
    given_up: bool,
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
}

/// Starts a server; the first has a processor of its own, where there are several.
fn node(first: bool) -> Cluster {
    let cluster = Cluster::start(&SETTINGS);
    let postmaster = cluster.pid();
    if first && processors() > 1 {
        let children = std::fs::read_to_string(format!("/proc/{postmaster}/task/{postmaster}/children"));
        let children = children.expect("the kernel tells of children");
        // Child processes that start from now on inherit the processor.
        pin(postmaster, "0");
        children.split_whitespace().filter_map(|child| child.parse().ok()).for_each(|child| pin(child, "0"));
    }
    cluster
}

impl Bench {
    /// Starts it with these databases, each with this many items on sale.
    pub(crate) fn start(databases: &[&str], items: u32) -> Bench {
        if processors() > 1 {
            // All processes that this one starts are pinned too.
            pin(std::process::id(), &format!("1-{}", processors() - 1));
        }
        let testbed = Testbed::of_tenants(node(true), node(false), databases);
        let bench = Bench { testbed, records: tempfile::tempdir().expect("make a directory") };
        for database in databases {
            prepare(&bench.plan(database, items, 1)).unwrap_or_else(|error| panic!("make {database}: {error}"));
        }
        bench.testbed.source.sql("postgres", "CHECKPOINT");
        bench
    }

    fn plan(&self, database: &str, items: u32, clients: u32) -> PostgresPlan {
        PostgresPlan {
            work: Work::Ordering { items },
            clients,
            think: THINK,
            duration: Duration::from_secs(3600),
            ..PostgresPlan::ordering(self.testbed.conninfo_of(database))
        }
    }

    /// Interactions a second that the source can do, almost without think time.
    pub(crate) fn capacity(&self, database: &str, items: u32) -> f64 {
        let plan = PostgresPlan { think: Duration::from_millis(1), ..self.plan(database, items, CAPACITY_BROWSERS) };
        let browsers = self.begin(plan);
        std::thread::sleep(Duration::from_secs(2));
        let from = stillpoint_measure::clock::now_ns();
        std::thread::sleep(Duration::from_secs(5));
        let to = stillpoint_measure::clock::now_ns();
        browsers.end().between(from, to).rate()
    }

    /// Starts browsers that make this many interactions a second.
    pub(crate) fn browsers(&self, database: &str, items: u32, rate: f64) -> Browsers {
        self.begin(self.plan(database, items, number_of_browsers(rate)))
    }

    fn begin(&self, plan: PostgresPlan) -> Browsers {
        let name = format!("{}.record", self.records.path().read_dir().map_or(0, Iterator::count));
        let record = self.records.path().join(name);
        let plan = PostgresPlan { record: Some(record.clone()), ..plan };
        let load = PostgresLoad::start(plan).unwrap_or_else(|error| panic!("start browsers: {error}"));
        Browsers { load, record }
    }

    /// Moves a database, with the product's defaults.
    pub(crate) fn migrate(&self, database: &str) -> Migration {
        let (begun, from_ns) = (Instant::now(), stillpoint_measure::clock::now_ns());
        let mut tool = self.testbed.tool_of(database, &["run"]);
        while tool.exit_status().is_none() && begun.elapsed() < WAIT_TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
        let (given_up, to_ns) = (tool.exit_status().is_none(), stillpoint_measure::clock::now_ns());
        if given_up {
            tool.signal(Signal::INT);
        }
        let migration = Migration { ended: tool.end_within(WAIT_TIMEOUT), given_up, from_ns, to_ns };
        for (phase, from, to) in migration.phases() {
            eprintln!("  {phase} took {:.1} s", (to - from) as f64 / 1e9);
        }
        migration
    }

    pub(crate) fn mebibytes(&self, database: &str) -> f64 {
        let bytes: f64 = self
            .testbed
            .source
            .sql("postgres", &format!("SELECT pg_database_size('{database}')"))
            .parse()
            .expect("a number");
        bytes / f64::from(1 << 20)
    }
}

/// Number of browsers for this many interactions a second.
pub(crate) fn number_of_browsers(rate: f64) -> u32 {
    ((rate * THINK.as_secs_f64()).round() as u32).clamp(1, BROWSERS_MAX)
}

impl Browsers {
    /// Ends the browsers; returns their answers.
    pub(crate) fn end(self) -> Answers {
        self.load.stop();
        let finished = self.load.wait().unwrap_or_else(|error| panic!("browsers: {error}"));
        let record = Record::open(&self.record).unwrap_or_else(|error| panic!("{error}"));
        Answers::of(record, finished.finished.end.dropped)
    }
}

impl Migration {
    /// Returns true if clients have reached the target.
    pub(crate) fn is_over(&self) -> bool {
        self.ended.code == Some(0) && !self.given_up
    }

    pub(crate) fn seconds(&self) -> f64 {
        (self.to_ns - self.from_ns) as f64 / 1e9
    }

    /// The outermost phases: name, beginning, end.
    pub(crate) fn phases(&self) -> Vec<(String, u64, u64)> {
        let mut phases = Vec::new();
        let mut open: Vec<(String, u64)> = Vec::new();
        for event in &self.ended.events {
            match &event.kind {
                EventKind::PhaseStarted { phase, .. } => open.push((phase.clone(), event.t_ns)),
                EventKind::PhaseEnded { .. } => {
                    if let Some((phase, from)) = open.pop()
                        && open.is_empty()
                    {
                        phases.push((phase, from, event.t_ns));
                    }
                }
                _ => {}
            }
        }
        phases
    }

    /// Pause that the command reported, in milliseconds.
    pub(crate) fn paused_ms(&self) -> Option<f64> {
        self.ended.events.iter().find_map(|event| match event.kind {
            EventKind::Migrate(migrate::Event::SwitchedOver { paused_us, .. }) => Some(paused_us as f64 / 1e3),
            _ => None,
        })
    }

    /// Duration as text, for a page.
    pub(crate) fn text(&self) -> String {
        let seconds = self.seconds();
        match self.paused_ms() {
            Some(paused) if self.is_over() => {
                format!("{seconds:.1} s, in which clients were paused for {paused:.0} ms")
            }
            _ if self.given_up => format!("{seconds:.0} s, was not over, and was given up"),
            _ => {
                let why: String = self.ended.complaints.lines().next().unwrap_or_default().chars().take(150).collect();
                format!("{seconds:.1} s and did not succeed ({why})")
            }
        }
    }
}

/// A line of a table.
pub(crate) fn line(cells: &[String]) -> String {
    let mut line = String::from("|");
    for cell in cells {
        // A write to a string cannot fail.
        let _ = write!(line, " {cell} |");
    }
    line.push('\n');
    line
}
