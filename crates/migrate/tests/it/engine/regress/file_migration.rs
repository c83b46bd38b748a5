//! One file of PostgreSQL's tests at a time: its definitions are copied, its writes are followed, both sides are
//! dumped.

use super::script::{Statement, When, statements};
use crate::engine::support::{Bench, observer, proxy_for};
use std::fmt;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_events::EventKind;
use stillpoint_migrate_engine::{Capture, Observer, Options, check, finish, run};
use stillpoint_testing::postgresql::{Cluster, Regression};

/// Objects that `check` refuses and that are removed before the migration: their kind, and a query for statements that
/// do so.
const REFUSED: &[(&str, &str)] = &[
    (
        "that tables and sequences are unlogged",
        "SELECT format('ALTER %s %I.%I SET LOGGED', CASE relkind WHEN 'r' THEN 'TABLE' ELSE 'SEQUENCE' END, nspname, relname) \
         FROM {relations} WHERE relkind IN ('r', 'S') AND relpersistence = 'u' ORDER BY relkind",
    ),
    (
        "event triggers that always fire",
        "SELECT format('DROP EVENT TRIGGER IF EXISTS %I', evtname) FROM pg_event_trigger WHERE evtenabled IN ('A', 'R')",
    ),
];

/// Objects that are removed too if images of rows are captured.
const WITHOUT_IMAGES: &[(&str, &str)] = &[
    (
        "columns with names of objects",
        "SELECT format('ALTER TABLE %I.%I DROP COLUMN IF EXISTS %I CASCADE', nspname, relname, attname) FROM {relations} \
         JOIN pg_attribute ON attrelid = c.oid AND attnum > 0 AND NOT attisdropped JOIN pg_type t ON t.oid = atttypid \
         WHERE relkind IN ('r', 'p') AND '{24,2202,2203,2204,2205,2206,3734,3769,4089,4096,4191}'::oid[] && ARRAY[t.oid, t.typelem]",
    ),
    (
        "tables of which others inherit",
        "SELECT format('DROP TABLE IF EXISTS %I.%I CASCADE', nspname, relname) FROM {relations} \
         WHERE relkind = 'r' AND EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid)",
    ),
    (
        "triggers",
        "SELECT format('DROP TRIGGER IF EXISTS %I ON %I.%I', tgname, nspname, relname) FROM {relations} \
         JOIN pg_trigger ON tgrelid = c.oid WHERE NOT tgisinternal AND tgparentid = 0",
    ),
    (
        "rules",
        "SELECT format('DROP RULE IF EXISTS %I ON %I.%I CASCADE', rulename, nspname, relname) FROM {relations} \
         JOIN pg_rewrite ON ev_class = c.oid WHERE rulename <> '_RETURN'",
    ),
    (
        "foreign keys that cascade",
        "SELECT format('ALTER TABLE %I.%I DROP CONSTRAINT IF EXISTS %I', nspname, relname, conname) FROM {relations} \
         JOIN pg_constraint ON conrelid = c.oid WHERE contype = 'f' AND conparentid = 0 \
         AND (confupdtype IN ('c', 'n', 'd') OR confdeltype IN ('c', 'n', 'd'))",
    ),
];

const RELATIONS: &str = "pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND nspname !~ '^pg_' \
     AND nspname NOT IN ('information_schema', 'stillpoint')";

/// The database that all others are copies of; every file finds its rows.
const BASE: &str = "base";
/// No migration of one file takes longer on two noisy cores.
const LIMIT: Duration = Duration::from_secs(300);

/// Two servers with a proxy in front of the first.
pub(crate) struct Servers {
    bench: Bench,
    tests: PathBuf,
    /// Directory with the files that the servers read.
    dir: PathBuf,
    port: u16,
    control: PathBuf,
    capture: Capture,
}

/// Result of one file.
#[derive(Debug, Clone)]
pub(crate) struct FileResult {
    pub(crate) name: String,
    /// Statements that ran while the target followed; then the number of those that wrote rows, and of those that
    /// failed.
    pub(crate) statements: usize,
    pub(crate) wrote: usize,
    pub(crate) failed: usize,
    pub(crate) taken_away: Vec<String>,
    pub(crate) outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Both sides hold the same; number of lines in the dump.
    Equal(usize),
    /// The target equals a database restored from the source's dump, and the source itself does not: in the restored
    /// database columns of inheriting tables have another order, and views another text.
    Restored(usize),
    /// The migration did not begin, or did not finish.
    Ended(String),
    /// Lines that only one side has.
    Differs(Vec<String>),
}

impl Outcome {
    pub(crate) fn is_equal(&self) -> bool {
        matches!(self, Outcome::Equal(_) | Outcome::Restored(_))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Equal(lines) => write!(f, "equal ({lines} lines)"),
            Outcome::Restored(lines) => write!(f, "equal ({lines} lines) to what the source's dump makes"),
            Outcome::Ended(why) => f.write_str(why),
            Outcome::Differs(lines) => write!(f, "differ in {} lines: {}", lines.len(), lines[0]),
        }
    }
}

/// Counts of the statements that ran while the target followed.
#[derive(Debug, Default)]
struct ScriptRun {
    wrote: usize,
    failed: usize,
}

impl Servers {
    pub(crate) fn start(regression: &Regression, capture: Capture) -> Arc<Servers> {
        let tests = &regression.tests;
        let bench = Bench::of_programs(&regression.programs, &["max_prepared_transactions=2", "fsync=off"]);
        let dir = stage(tests, &bench.source);
        let (port, control) = proxy_for(bench.dir.path(), &bench.source, "*");
        let servers = Servers { bench, tests: tests.into(), dir, port, control, capture };
        let made = format!("CREATE DATABASE {BASE} TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'");
        servers.bench.source.sql("postgres", &made);
        servers.run_whole("test_setup", BASE);
        Arc::new(servers)
    }

    /// Runs one file in a database of its own, after the files that it needs, and moves the database.
    pub(crate) async fn carry(self: &Arc<Servers>, name: &str, needed: &[&str]) -> FileResult {
        let database = format!("r_{}", name.replace('.', "_"));
        let (source, target) = (&self.bench.source, &self.bench.target);
        source.sql("postgres", &format!("CREATE DATABASE {database} TEMPLATE {BASE}"));
        needed.iter().for_each(|name| self.run_whole(name, &database));
        let before = self.part(name, When::Before);
        let failed = self.run_part((&database, source.port()), &before);
        println!("{name} before: {} statements, {} errors", before.len(), failed.len());
        let taken_away = self.take_away(&database);
        self.bring_roles();
        // A client that asks for a database registers it in the proxy.
        self.psql((&database, self.port), &["-c", "SELECT 1"]);
        let during = self.part(name, When::During);
        let (outcome, ran) = match self.move_it(&database, during.clone()).await {
            Ok(ran) => (self.compare(&database), ran),
            Err((why, ran)) => (Outcome::Ended(self.without_places(&why)), ran),
        };
        if !outcome.is_equal() {
            println!("of the target: {}", last_lines(&target.log_text()));
        } else {
            for server in [source, target] {
                server.sql("postgres", &format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)"));
                let roles = "SELECT format('DROP ROLE %I', rolname) FROM pg_roles WHERE oid >= 16384";
                let dropped = server.sql("postgres", roles);
                // A role that owns something stays.
                dropped.lines().for_each(|sql| drop(server.try_sql("postgres", sql)));
            }
        }
        let ScriptRun { wrote, failed } = ran;
        FileResult { name: name.into(), statements: during.len(), wrote, failed, taken_away, outcome }
    }

    /// Migrates the database, with these statements while the target follows; an error has the counts of what ran
    /// before it.
    async fn move_it(
        self: &Arc<Servers>,
        database: &str,
        during: Vec<Statement>,
    ) -> Result<ScriptRun, (String, ScriptRun)> {
        let ours = self.bench.options(database);
        let options = Options { proxy: self.control.clone(), capture: Some(self.capture), share: 0.0, ..ours };
        let report = check(&options).await.map_err(|error| (error.to_string(), ScriptRun::default()))?;
        let refusals = report.refusals();
        if !refusals.is_empty() {
            return Err((format!("refused: {}", refusals.join("; ")), ScriptRun::default()));
        }
        let (told, _events) = observer();
        let ran = Arc::new(Mutex::new(ScriptRun::default()));
        let (counted, servers, at) = (Arc::clone(&ran), Arc::clone(self), database.to_owned());
        let observer: Observer = Arc::new(move |event| {
            // The target follows, and nothing else runs in this thread.
            if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
                let failed = servers.run_part((&at, servers.port), &during);
                let has_failed = |at: usize| failed.iter().any(|(other, _)| *other == at);
                let wrote = during.iter().enumerate().filter(|(at, statement)| statement.writes() && !has_failed(*at));
                *counted.lock().unwrap() = ScriptRun { wrote: wrote.count(), failed: failed.len() };
            }
            told(event);
        });
        let moved = async {
            run(&options, observer).await?;
            finish(&options).await
        };
        let moved = tokio::time::timeout(LIMIT, moved).await;
        let ran = std::mem::take(&mut *ran.lock().unwrap());
        match moved {
            Ok(Ok(())) => Ok(ran),
            Ok(Err(failure)) => Err((failure.to_string(), ran)),
            Err(_) => Err((format!("did not end within {} s", LIMIT.as_secs()), ran)),
        }
    }

    /// Replaces directories and ports, which differ in each run.
    fn without_places(&self, text: &str) -> String {
        let ports = [self.bench.source.port(), self.bench.target.port()].map(|port| format!("127.0.0.1:{port}"));
        let text = text.replace(&self.dir.display().to_string(), "DIR");
        let text = text.replace(&ports[0], "the source").replace(&ports[1], "the target");
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn compare(&self, database: &str) -> Outcome {
        self.bench.look_into_source(database);
        let (a, b) = (dump(&self.bench.source, database), dump(&self.bench.target, database));
        let differs = only_in(&a, &b).map(|line| format!("source: {line}"));
        let differs: Vec<String> = differs.chain(only_in(&b, &a).map(|line| format!("target: {line}"))).collect();
        if differs.is_empty() {
            Outcome::Equal(a.len())
        } else if self.restored(database) == b {
            Outcome::Restored(b.len())
        } else {
            Outcome::Differs(differs)
        }
    }

    /// Dump of a database at the target that was restored from the source's dump.
    fn restored(&self, database: &str) -> Vec<String> {
        let (made, path) = (format!("{database}_made"), self.dir.join("made.sql"));
        let output = self
            .bench
            .source
            .client("pg_dump")
            .args(["--no-blobs", "--exclude-schema=stillpoint"])
            .arg(database)
            .output();
        fs::write(&path, output.expect("run pg_dump").stdout).expect("write a dump");
        let target = &self.bench.target;
        target.sql("postgres", &format!("CREATE DATABASE {made} TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"));
        target.client("psql").args(["-Xq", "-d", &made, "-f"]).arg(&path).output().expect("run psql");
        let lines = dump(target, &made);
        target.sql("postgres", &format!("DROP DATABASE {made} WITH (FORCE)"));
        lines
    }

    /// Removes objects that would be refused; returns their kinds and numbers.
    fn take_away(&self, database: &str) -> Vec<String> {
        let mut taken = Vec::new();
        let without_images = if self.capture == Capture::Rows { WITHOUT_IMAGES } else { &[] };
        for (what, question) in REFUSED.iter().chain(without_images) {
            let wanted = self.bench.source.sql(database, &question.replace("{relations}", RELATIONS));
            let wanted: Vec<&str> = wanted.lines().collect();
            let tried = |sql: &&&str| self.bench.source.try_sql(database, sql).is_err();
            // Some statements succeed only after others.
            let again = wanted.iter().filter(tried).collect::<Vec<_>>();
            let failed: Vec<String> =
                again.iter().filter_map(|sql| self.bench.source.try_sql(database, sql).err()).collect();
            if !wanted.is_empty() {
                println!("{what}: {}, failed: {failed:?}", wanted.len());
                taken.push(format!("{} {what}", wanted.len()));
            }
        }
        taken
    }

    fn bring_roles(&self) {
        let roles = self.bench.source.client("pg_dumpall").args(["--roles-only"]).output().expect("run pg_dumpall");
        let path = self.dir.join("roles.sql");
        fs::write(&path, &roles.stdout).expect("write a file");
        self.bench.target.client("psql").args(["-Xq", "-d", "postgres", "-f"]).arg(&path).output().expect("run psql");
    }

    /// Statements of a file for this time.
    fn part(&self, name: &str, when: When) -> Vec<Statement> {
        let text = fs::read_to_string(self.tests.join(format!("sql/{name}.sql"))).expect("a file of tests");
        statements(&text).into_iter().filter(|s| s.when() == when || s.when() == When::Both).collect()
    }

    /// Runs a whole file at the source; the files after it see its effects.
    fn run_whole(&self, name: &str, database: &str) {
        let path = self.tests.join(format!("sql/{name}.sql")).display().to_string();
        self.psql((database, self.bench.source.port()), &["-f", &path]);
    }

    /// Runs statements in one psql; returns the failed ones with their errors.
    fn run_part(&self, at: (&str, u16), part: &[Statement]) -> Vec<(usize, String)> {
        let (mut text, mut lines) = (String::new(), Vec::new());
        for statement in part {
            writeln!(text, "{}", statement.text.trim()).expect("memory");
            lines.push(text.lines().count());
        }
        let path = self.dir.join("part.sql").display().to_string();
        fs::write(&path, text).expect("write a script");
        let output = self.psql(at, &["-f", &path]);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let failed = errors.lines().filter_map(|line| {
            let (place, why) = line.split_once(": ERROR:").or_else(|| line.split_once(": FATAL:"))?;
            let line: usize = place.rsplit(':').next()?.parse().ok()?;
            Some((lines.partition_point(|last| *last < line), why.trim().to_owned()))
        });
        failed.collect()
    }

    fn psql(&self, (database, port): (&str, u16), arguments: &[&str]) -> Output {
        let dir = &self.dir;
        let mut psql = self.bench.source.client("psql");
        psql.args(["-X", "-q", "-d", database, "-v", "HIDE_TABLEAM=on", "-v", "HIDE_TOAST_COMPRESSION=on"]);
        psql.args(arguments).env("PGPORT", port.to_string()).env("PGTZ", "PST8PDT");
        psql.env("PG_LIBDIR", dir).env("PG_DLSUFFIX", ".so").env("PG_ABS_SRCDIR", dir).env("PG_ABS_BUILDDIR", dir);
        psql.env("PGOPTIONS", "-c statement_timeout=60s").current_dir(dir);
        psql.stdin(Stdio::null()).output().expect("run psql")
    }
}

/// A directory that the server can read, with the data of the files.
fn stage(tests: &Path, cluster: &Cluster) -> PathBuf {
    let dir = cluster.socket_dir().join("regress");
    fs::create_dir_all(dir.join("results")).expect("make a directory");
    for part in ["data", "regress.so"] {
        let copied = Command::new("cp").arg("-r").arg(tests.join(part)).arg(&dir).status().expect("run cp");
        assert!(copied.success(), "copy {part}");
    }
    let owned = Command::new("chown").arg("-R").arg("postgres:").arg(&dir).status().expect("run chown");
    assert!(owned.success(), "give the directory to the server");
    dir
}

/// Dump and restore change the place of a column if its table was made to inherit later: the comparison ignores which
/// column is the last.
fn without_place(line: &str) -> String {
    let is_row = line.starts_with("INSERT INTO");
    if is_row { line.to_owned() } else { line.trim_end_matches(',').to_owned() }
}

fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Dump of a database, sorted; its publications are not moved.
fn dump(cluster: &Cluster, database: &str) -> Vec<String> {
    let mut dump = cluster.client("pg_dump");
    let output = dump
        .args(["--inserts", "--no-blobs", "--no-publications", "--no-subscriptions", "--exclude-schema=stillpoint"])
        .args(["-d", database])
        .output()
        .expect("run pg_dump");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // A random word of pg_dump is not part of the data.
    let of_dump = |line: &&str| !line.starts_with("\\restrict ") && !line.starts_with("\\unrestrict ");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines: Vec<String> = text.lines().filter(of_dump).map(without_place).collect();
    lines.sort();
    lines
}

/// Lines that the first list has more often than the second; both are sorted.
fn only_in<'a>(first: &'a [String], second: &[String]) -> impl Iterator<Item = &'a String> {
    let mut rest = second.iter().peekable();
    first.iter().filter(move |line| {
        while rest.next_if(|other| other < line).is_some() {}
        rest.next_if(|other| other == line).is_none()
    })
}
