//! A part of a database: what is moved, what is refused, what stays, and definitions that change meanwhile.

use crate::engine::support::{Bench, observer, sums};
use std::sync::{Arc, Mutex};
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_engine::{
    Capture, Error, Observer, Options, Selection, State, Verdict, check, fallback, run, status,
};
use stillpoint_testing::postgresql::{Cluster, available};
use tokio::sync::Notify;

/// Schemas `sales` and `"Sa.l\"es"` to move, `hr` to leave out; a function and a type of `code` are needed.
const SETUP: &str = r#"
CREATE SCHEMA sales; CREATE SCHEMA "Sa.l""es"; CREATE SCHEMA hr; CREATE SCHEMA code;
CREATE TYPE code.mood AS ENUM ('ok', 'bad'); CREATE TYPE code.unused AS ENUM ('x');
CREATE FUNCTION code.stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.note := ''seen''; RETURN NEW; END';
CREATE FUNCTION code.other() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE SEQUENCE hr.numbers;
CREATE TABLE sales.orders (id serial PRIMARY KEY, number int DEFAULT nextval('hr.numbers'), how code.mood, note text);
CREATE TRIGGER stamp BEFORE INSERT ON sales.orders FOR EACH ROW EXECUTE FUNCTION code.stamp();
CREATE TABLE sales.items (id int PRIMARY KEY, of int REFERENCES sales.orders);
CREATE TABLE sales.parts (id int, at int, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE sales.parts_1 PARTITION OF sales.parts FOR VALUES FROM (0) TO (10);
CREATE TABLE hr.parts_2 PARTITION OF sales.parts FOR VALUES FROM (10) TO (20);
CREATE TABLE "Sa.l""es"."Or*d""er.s
x" ("Na""me" text PRIMARY KEY, n int);
CREATE VIEW sales.seen AS SELECT o.id, i.of FROM sales.orders o JOIN sales.items i ON i.of = o.id;
CREATE MATERIALIZED VIEW sales.many AS SELECT count(*) FROM sales.orders;
CREATE TABLE hr.person (id serial PRIMARY KEY, name text); CREATE VIEW hr.names AS SELECT name FROM hr.person;
CREATE FUNCTION sales.of_person(hr.person) RETURNS text LANGUAGE sql AS 'SELECT $1.name';
CREATE PUBLICATION news FOR TABLE sales.orders, hr.person; CREATE PUBLICATION old FOR TABLES IN SCHEMA hr;
INSERT INTO sales.orders (how) SELECT 'ok' FROM generate_series(1, 40);
INSERT INTO sales.items SELECT n, n FROM generate_series(1, 40) n; INSERT INTO sales.parts SELECT n, n % 20 FROM generate_series(1, 60) n;
INSERT INTO hr.person (name) SELECT 'x' FROM generate_series(1, 30);
INSERT INTO "Sa.l""es"."Or*d""er.s
x" VALUES ('a', 1), ('b', 2); REFRESH MATERIALIZED VIEW sales.many"#;

const EVEN_ODDER: &str = "\"Sa.l\"\"es\".\"Or*d\"\"er.s\nx\"";

fn bench() -> Bench {
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", SETUP);
    bench
}

fn selection(include: &[&str], exclude: &[&str], leave_rest: bool) -> Selection {
    let texts = |patterns: &[&str]| patterns.iter().map(|pattern| (*pattern).to_owned()).collect::<Vec<_>>();
    Selection::parse(&texts(include), &texts(exclude), leave_rest).expect("patterns")
}

fn options(bench: &Bench, selection: Selection) -> Options {
    Options { selection, share: 0.0, ..bench.options("shop") }
}

/// Definitions of a part of database `shop` as the pg_dump of another server prints them.
pub(crate) fn part_by(dumper: &Cluster, cluster: &Cluster, options: &[&str]) -> String {
    let mut command = dumper.client("pg_dump");
    command.args(["-s", "-h", "127.0.0.1", "-p", &cluster.port().to_string(), "-d", "shop", "-U", "postgres"]);
    let output = command.args(options).output().expect("run pg_dump");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    let of_migration =
        |line: &&str| line.starts_with('\\') || line.starts_with("--") || line.contains(" REPLICA IDENTITY ");
    text.lines().filter(|line| !of_migration(line) && !line.is_empty()).map(|line| format!("{line}\n")).collect()
}

fn part(bench: &Bench, cluster: &Cluster, options: &[&str]) -> String {
    part_by(&bench.target, cluster, options)
}

/// Checksums of the rows of all tables of some schemas.
pub(crate) fn rows(cluster: &Cluster, schemas: &str) -> String {
    let all = sums(cluster, "shop");
    all.lines().filter(|line| schemas.split(' ').any(|schema| line.starts_with(schema))).collect::<Vec<_>>().join("\n")
}

/// An observer that keeps all events, and calls `act` when a phase begins.
fn acting(act: impl Fn(&str) + Send + Sync + 'static) -> (Observer, Arc<Mutex<Vec<Event>>>) {
    let seen: Arc<Mutex<Vec<Event>>> = Arc::default();
    let kept = Arc::clone(&seen);
    let observer: Observer = Arc::new(move |event: Event| {
        if let EventKind::PhaseStarted { phase, .. } = &event.kind {
            act(phase);
        }
        kept.lock().expect("no test thread panicked").push(event);
    });
    (observer, seen)
}

const MOVED: [&str; 4] = ["-nsales", "-n\"Sa.l\"\"es\"", "-thr.parts_2", "-thr.numbers"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_moves_and_the_rest_stays_where_it_is() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench());
    let (source, target) = (&bench.source, &bench.target);
    source.sql("shop", "CREATE ROLE of_rest; ALTER TABLE hr.person OWNER TO of_rest");
    let implied = options(&bench, selection(&["sales", "\"Sa.l\"\"es\".\"Or*\"*"], &[], false));
    let report = check(&implied).await.expect("a report");
    let refusals = report.refusals();
    let named = |name: &str| refusals.iter().any(|text| text.contains(name) && text.contains("--leave-rest"));
    assert!(named("table hr.person") && named("view hr.names") && refusals.len() == 2, "{refusals:#?}");

    let options = Options { rehearse: true, ..options(&bench, selection(&["sales", EVEN_ODDER], &["hr"], false)) };
    let report = check(&options).await.expect("a report");
    assert_eq!(report.refusals(), Vec::<String>::new());
    let verdict = |name: &str| {
        let found = report.findings.iter().find(|finding| finding.name == name);
        found.unwrap_or_else(|| panic!("{name} in {:#?}", report.findings)).verdict
    };
    for (name, moved) in [
        ("sales.orders", true),
        ("hr.parts_2", true),
        ("hr.numbers", true),
        ("code.mood", true),
        ("code.stamp()", true),
        ("hr.person", false),
        ("hr.names", false),
        ("hr.person_id_seq", false),
        ("code.unused", false),
        ("code.other()", false),
        ("sales.of_person(hr.person)", false),
        ("of_rest", false),
    ] {
        assert_eq!(verdict(name), if moved { Verdict::Moved } else { Verdict::NotMoved }, "{name}");
    }

    let (before, there) = (part(&bench, source, &MOVED), rows(source, "sales hr.parts \"Sa"));
    let load = Arc::clone(&bench);
    let (watching, seen) = acting(move |phase| {
        if phase == "catch-up" {
            load.source.sql("shop", "INSERT INTO hr.person (name) VALUES ('later'); ALTER TABLE hr.person ADD later int; CREATE TABLE hr.new (id int PRIMARY KEY)");
        }
    });
    run(&options, watching).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let seen = std::mem::take(&mut *seen.lock().expect("no test thread panicked"));
    let compared = |event: &Event| match event.kind {
        EventKind::Migrate(migrate::Event::Compared { tables, not_compared, .. }) => Some((tables, not_compared)),
        _ => None,
    };
    assert_eq!(seen.iter().find_map(compared), Some((5, 2)));
    let redefined = |event: &Event| matches!(event.kind, EventKind::Migrate(migrate::Event::Redefining { .. }));
    assert!(!seen.iter().any(redefined), "what is left out may change: {seen:?}");
    let warned = |event: &Event| matches!(&event.kind, EventKind::Warning { text } if text.contains("hr.person, ") || text.contains("hr.new"));
    assert!(seen.iter().any(warned), "{seen:?}");

    assert_eq!(part(&bench, target, &MOVED), before);
    assert_eq!(rows(target, "sales hr.parts \"Sa"), there);
    let only = "SELECT string_agg(x, ' ' ORDER BY x) FROM (SELECT c.oid::regclass::text FROM pg_class c WHERE relkind IN ('r', 'v') \
                AND relnamespace::regnamespace::text = 'hr' UNION ALL SELECT typname FROM pg_type WHERE typnamespace::regnamespace::text \
                = 'code' AND typtype = 'e' UNION ALL SELECT proname FROM pg_proc WHERE pronamespace::regnamespace::text IN ('code', \
                'sales')) AS t (x)";
    assert_eq!(target.sql("shop", only), "hr.parts_2 mood stamp");
    assert_eq!(target.sql("shop", "SELECT string_agg(concat(p.pubname, r.prrelid::regclass), ' ') FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid WHERE p.pubname !~ '^stillpoint' "), "newssales.orders old");
    let state = status(&options).await.expect("a status");
    assert_eq!(state.record.expect("a record").selection, options.selection);

    // The way back brings what was written there, and finds the rest as it was.
    target.sql("shop", "INSERT INTO sales.orders (how) VALUES ('bad'); UPDATE hr.parts_2 SET id = id + 1000");
    let there = rows(target, "sales hr.parts \"Sa");
    fallback(&bench.options("shop"), observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let ours = "SELECT count(*) FROM pg_publication WHERE pubname ~ '^stillpoint'";
    assert_eq!(source.sql("shop", ours), "0");
    assert_eq!(source.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "0");
    assert_eq!(target.sql("postgres", "SELECT count(*) FROM pg_database WHERE datname = 'shop'"), "0");
    assert_eq!(rows(source, "sales hr.parts \"Sa"), there);
    assert_eq!(part(&bench, source, &MOVED), before);
    assert_eq!(source.sql("shop", "SELECT count(*) FROM hr.person WHERE later IS NULL"), "31");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_selection_tears_apart_is_refused_by_name() {
    if !available() {
        return;
    }
    let bench = bench();
    bench.source.sql(
        "shop",
        "CREATE VIEW sales.all_names AS SELECT name FROM hr.person; CREATE TABLE hr.badge (of int REFERENCES sales.items); \
         CREATE TABLE sales.visit (of int CONSTRAINT visitor REFERENCES hr.person); CREATE TABLE hr.base (n int); \
         CREATE TABLE sales.heir (m int) INHERITS (sales.orders, hr.base); CREATE TABLE sales.names (what regclass); \
         INSERT INTO sales.names VALUES ('hr.person'); CREATE POLICY own ON sales.items USING (of IN (SELECT id FROM hr.base)); \
         CREATE EXTENSION pg_trgm SCHEMA code; CREATE DOMAIN hr.short AS text CHECK (length(VALUE) < 9); \
         CREATE TABLE sales.uses (a hr.short, b hr.person)",
    );
    let refusals = async |include: &[&str], exclude: &[&str]| {
        let report = check(&options(&bench, selection(include, exclude, true))).await.expect("a report");
        report.refusals()
    };
    let all = refusals(&["sales"], &["hr"]).await;
    for expected in [
        "selection sales.visit: constraint visitor on table sales.visit refers to hr.person, which is left out: include hr.person",
        "selection hr.badge: it is left out, and its constraint badge_of_fkey on table hr.badge refers to sales.items",
        "selection sales.all_names: rule _RETURN on view sales.all_names needs hr.person, which is left out",
        "selection sales.items: policy own on table sales.items needs hr.base, which is left out",
        "selection sales.uses: table sales.uses needs hr.person, which is left out",
        "selection sales.heir: it inherits from sales.orders, which is moved, and from hr.base, which is left out",
    ] {
        assert!(all.iter().any(|text| text.starts_with(expected)), "{expected}: {all:#?}");
    }
    assert_eq!(all.len(), 6, "{all:#?}");
    bench.source.sql(
        "shop",
        "DROP VIEW sales.all_names; DROP TABLE hr.badge, sales.visit, sales.heir; DROP POLICY own ON sales.items; \
         ALTER TABLE sales.uses DROP b",
    );
    let all = refusals(&["sales"], &["hr"]).await;
    let named = "object name sales.names.what: 1 values name objects that --include and --exclude leave out";
    assert_eq!(all, [named]);

    for (include, exclude, expected) in [
        (
            "sales.parts_1",
            "hr",
            "selection sales.parts_1: it cannot be moved alone, because it is a part of sales.parts",
        ),
        (
            "sales",
            "hr.parts_2",
            "selection hr.parts_2: it cannot be left out alone, because it is a part of sales.parts",
        ),
        ("sales", "sales.orders_id_seq", "selection sales.orders_id_seq: it cannot be left out alone"),
        ("sales", "hr.PERSONS", "selection hr.PERSONS: this pattern matches nothing"),
        ("Sa.l*", "hr", "selection Sa.l*: this pattern matches nothing"),
        ("orders", "hr", "selection orders: this pattern matches nothing"),
    ] {
        let all = refusals(&[include], &[exclude]).await;
        assert!(all.iter().any(|text| text.starts_with(expected)), "{expected}: {all:#?}");
    }
    let by_proxy =
        Options { capture: Some(Capture::Rows), ..options(&bench, selection(&[], &["hr", "sales.names"], false)) };
    let all = check(&by_proxy).await.expect("a report").refusals();
    assert!(all.iter().any(|text| text.starts_with("selection capture: only the log")), "{all:#?}");
}

/// Changes of definitions in the middle, seen from inside and outside of the selection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_in_mid_run_is_selected_by_its_name_then() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench());
    let source = &bench.source;
    source.sql(
        "shop",
        "CREATE TABLE sales.leaves AS SELECT g AS id FROM generate_series(1, 9) g; CREATE TABLE hr.comes (id int PRIMARY KEY); \
         INSERT INTO hr.comes SELECT g FROM generate_series(1, 7) g; ALTER TABLE sales.leaves ADD PRIMARY KEY (id)",
    );
    let options = options(&bench, selection(&["sales", "\"Sa.l\"\"es\""], &["hr"], false));
    let at = Arc::clone(&bench);
    let (watching, _) = acting(move |phase| {
        if phase == "compare" {
            at.source.sql("shop", "ALTER TABLE sales.items ADD by int CONSTRAINT new_key REFERENCES hr.person");
        }
    });
    let failure = run(&options, watching).await.expect_err("a foreign key to what is left out");
    assert!(failure.error.to_string().contains("new_key on table sales.items refers to hr.person"), "{failure:?}");
    assert_eq!(failure.state, State::OnSource);
    source.sql("shop", "ALTER TABLE sales.items DROP by");

    let reached = Arc::new(Notify::new());
    let (killed, at) = (Arc::clone(&reached), Arc::clone(&bench));
    let (watching, _) = acting(move |phase| {
        if phase == "compare" {
            at.source.sql(
                "shop",
                "CREATE TABLE sales.fresh (id int PRIMARY KEY); INSERT INTO sales.fresh SELECT g FROM generate_series(1, 8) g; \
                 CREATE TABLE hr.fresh (id int PRIMARY KEY); INSERT INTO hr.fresh VALUES (1); \
                 ALTER TABLE hr.comes SET SCHEMA sales; ALTER TABLE sales.leaves SET SCHEMA hr; \
                 INSERT INTO sales.comes VALUES (8); UPDATE hr.leaves SET id = id + 100; INSERT INTO sales.orders (how) VALUES ('bad'); \
                 ALTER TABLE \"Sa.l\"\"es\".\"Or*d\"\"er.s\nx\" ADD m int DEFAULT 3; TRUNCATE sales.parts, hr.fresh",
            );
            killed.notify_one();
        }
    });
    tokio::select! {
        biased;
        () = reached.notified() => {}
        ended = run(&options, watching) => panic!("it ended: {ended:?}"),
    }

    for other in [Selection::default(), selection(&["sales"], &["hr"], false)] {
        let refused =
            run(&Options { selection: other, ..options.clone() }, observer().0).await.expect_err("another part");
        assert!(matches!(&refused.error, Error::WrongPhase(why) if why.contains("of another part")), "{refused:?}");
        assert_eq!(refused.state, State::Untouched);
    }
    // One that left comes back, and is written to before and after it is copied.
    let (round, at) = (Mutex::new(0), Arc::clone(&bench));
    let (watching, _) = acting(move |phase| {
        let mut round = round.lock().expect("no test thread panicked");
        match (phase, *round) {
            ("prepare", 0) => drop(
                at.source.sql("shop", "ALTER TABLE hr.leaves SET SCHEMA sales; INSERT INTO sales.leaves VALUES (500)"),
            ),
            ("prepare", 1) => drop(at.source.sql("shop", "INSERT INTO sales.leaves VALUES (501)")),
            _ => return,
        }
        *round += 1;
    });
    run(&options, watching).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.look_into_source("shop");
    assert_eq!(part(&bench, &bench.target, &MOVED), part(&bench, source, &MOVED));
    let moved = "sales hr.parts \"Sa";
    assert_eq!(rows(&bench.target, moved), rows(source, moved));
    let tables = "SELECT string_agg(c.oid::regclass::text, ' ' ORDER BY c.oid::regclass::text) FROM pg_class c WHERE relkind = 'r' AND \
                  relnamespace::regnamespace::text IN ('sales', 'hr')";
    let there = "hr.parts_2 sales.comes sales.fresh sales.items sales.leaves sales.orders sales.parts_1";
    assert_eq!(bench.target.sql("shop", tables), there);
    assert_eq!(bench.target.sql("shop", "SELECT count(*) FROM sales.leaves"), "11");
}
