//! A part of a database moves by the command line and through the proxy: clients, a killed command, definitions that cross the
//! border again and again, the way back, and the source opened for the rest.

use crate::engine::selection::{part_by, rows};
use rustix::process::Signal;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_tests::Testbed;
use stillpoint_testing::postgresql::{Cluster, available};
use stillpoint_testing::wait::until;

const SETUP: &str = "CREATE SCHEMA sales; CREATE SCHEMA hr; CREATE TABLE sales.accounts (id int PRIMARY KEY, n int NOT NULL); \
    INSERT INTO sales.accounts SELECT g, 0 FROM generate_series(1, 100) g; CREATE TABLE hr.person (id serial PRIMARY KEY, n int); \
    CREATE TABLE sales.log (id serial PRIMARY KEY, account int REFERENCES sales.accounts, at timestamptz DEFAULT now()); \
    INSERT INTO hr.person (n) SELECT g FROM generate_series(1, 50) g";
const SCRIPT: &str = "\\set id random(1, 100)\nBEGIN;\nUPDATE sales.accounts SET n = n + 1 WHERE id = :id;\n\
    INSERT INTO sales.log (account) VALUES (:id);\nEND;\n";

/// Tables that definitions move across the border, and a number for the next choice.
struct Tables {
    /// Schema and name.
    all: Vec<(&'static str, String)>,
    state: u64,
}

impl Tables {
    fn below(&mut self, end: usize) -> usize {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % end
    }

    /// One statement that creates, moves, renames, changes or drops a table, and one that writes to it.
    fn next(&mut self, round: usize) -> String {
        let schemas = ["sales", "hr"];
        let kind = if self.all.len() < 4 { 0 } else { self.below(8) };
        if kind < 2 {
            let (schema, name) = (schemas[self.below(2)], format!("t{round}"));
            self.all.push((schema, name.clone()));
            return format!(
                "CREATE TABLE {schema}.{name} (id int PRIMARY KEY, note text); INSERT INTO {schema}.{name} SELECT g, 'n' FROM \
                 generate_series(1, 20) g"
            );
        }
        let at = self.below(self.all.len());
        let (schema, name) = self.all[at].clone();
        let table = format!("{schema}.{name}");
        match kind {
            2 | 3 => {
                let other = if schema == "sales" { "hr" } else { "sales" };
                self.all[at].0 = other;
                format!(
                    "ALTER TABLE {table} SET SCHEMA {other}; UPDATE {other}.{name} SET note = 'moved {round}' WHERE id % 2 = 0"
                )
            }
            4 => format!(
                "ALTER TABLE {table} ADD COLUMN c{round} int DEFAULT {round}; DELETE FROM {table} WHERE id = {}",
                1 + round % 20
            ),
            5 => {
                self.all[at].1 = format!("r{round}");
                format!(
                    "ALTER TABLE {table} RENAME TO r{round}; INSERT INTO {schema}.r{round} (id) VALUES ({})",
                    1000 + round
                )
            }
            6 => {
                self.all.remove(at);
                format!("DROP TABLE {table}")
            }
            _ => format!("TRUNCATE {table}; INSERT INTO {table} (id, note) VALUES ({round}, 'after'), (0, 'more')"),
        }
    }
}

#[test]
#[ignore = "full tier: 40 definitions across the border under load, a minute; engine::selection has one of each kind"]
fn a_part_moves_under_load_while_tables_cross_its_border() {
    if !available() {
        return;
    }
    let settings = ["wal_level=logical", "deadlock_timeout=100ms"];
    let testbed = Testbed::of(Cluster::start(&settings), Cluster::start(&settings));
    let (source, target) = (&testbed.source, &testbed.target);
    source.sql("shop", SETUP);
    let script = testbed.path("script.sql");
    std::fs::write(&script, SCRIPT).expect("write a script");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("make it readable");
    std::fs::set_permissions(testbed.path("."), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("reachable");
    let script = script.display().to_string();
    let words = ["-n", "-f", &script, "-c", "4", "-T", "600", "-R", "100"];
    let mut load = source.pgbench_load("shop", testbed.port(), &words);

    let refused = testbed.run(&["run", "--include", "sales", "--share", "0"]);
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(refused.complaints.contains("hr.person") && refused.complaints.contains("--leave-rest"), "{refused:?}");
    let words = ["run", "--include", "sales", "--leave-rest", "--share", "0", "--hold", "--pause-timeout", "5s"];
    let compared = |event: &Event| matches!(&event.kind, EventKind::PhaseEnded { phase, .. } if phase == "compare");
    let mut holder = testbed.tool(&words);
    assert!(holder.await_event(compared), "{:?}", holder.end());
    let mut tables = Tables { all: Vec::new(), state: 20_261_130 };
    let mut define = |rounds: std::ops::Range<usize>| {
        for round in rounds {
            source.sql("shop", &tables.next(round));
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    };
    define(0..20);
    holder.signal(Signal::KILL);
    let killed = holder.end();
    assert_eq!(killed.code, None, "{killed:?}");
    define(20..30);
    let other = testbed.run(&["run", "--include", "hr", "--leave-rest"]);
    assert!(other.code == Some(3) && other.complaints.contains("another part"), "{other:?}");
    assert_eq!(testbed.ask(&["status"])["record"]["selection"]["include"][0], "sales");
    let holder = testbed.tool(&words);
    until("a command that holds", || testbed.ask(&["status"])["holding"]["why_not"].as_str().map(drop));
    define(30..40);
    let ordered = testbed.run(&["switch"]);
    let ended = holder.end();
    assert_eq!((ordered.code, ended.code), (Some(0), Some(0)), "{ended:?}");
    assert!(load.running(), "clients did not notice");
    let through =
        std::process::Command::new("psql").args(["-X", "-d", &testbed.conninfo(), "-c", "TABLE hr.person"]).output();
    let through = through.expect("run psql");
    assert!(
        !through.status.success() && String::from_utf8_lossy(&through.stderr).contains("does not exist"),
        "{through:?}"
    );
    load.end();

    let there = rows(target, "sales");
    testbed.succeed(&["fallback", "--pause-timeout", "5s"]);
    assert_eq!(rows(source, "sales"), there, "all that was written on either side");
    assert!(there.lines().count() > 2, "{there}");
    let (definitions, rest) = (part_by(target, source, &["-nsales"]), rows(source, "hr"));
    testbed.assert_clean();
    testbed.succeed(&["run", "--exclude", "hr", "--share", "0", "--pause-timeout", "5s"]);
    assert_eq!(part_by(target, target, &["-nsales"]), definitions);
    assert_eq!(rows(target, "sales"), there);
    assert_eq!(target.sql("shop", "SELECT count(*) FROM pg_namespace WHERE nspname = 'hr'"), "0");
    testbed.succeed(&["finish", "--reopen-source"]);
    assert_eq!(rows(source, "hr"), rest);
    source.sql("shop", "INSERT INTO hr.person (n) VALUES (1)");
    assert_eq!(source.sql("shop", "SHOW default_transaction_read_only"), "off");
}
