//! Definitions that change on the source while the target follows are repeated there, and no row is lost.

use crate::engine::managed_roles::PROVIDER_ROLES;
use crate::engine::support::{Bench, dumped, observer, sums};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_engine::{Observer, Options, Outcome, SwitchOrder, fallback, order_switch, run, status};
use stillpoint_testing::postgresql::{NEWER_MAJOR, available, newer_available};

const SETUP: &str = "CREATE TYPE mood AS ENUM ('ok', 'bad'); CREATE SEQUENCE tickets; \
    CREATE FUNCTION doubled(n int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT n * 2'; \
    CREATE TABLE goods (id int PRIMARY KEY, name varchar(10) NOT NULL, price numeric CHECK (price > 0), was text DEFAULT 'x', \
    feels mood DEFAULT 'ok'); \
    CREATE TABLE orders (id serial PRIMARY KEY, goods int REFERENCES goods, count int NOT NULL DEFAULT 1); \
    CREATE INDEX by_count ON orders (count); CREATE VIEW dear AS SELECT id, price FROM goods WHERE price > 10; \
    CREATE TABLE events (at date NOT NULL, what text) PARTITION BY RANGE (at); \
    CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM ('2026-01-01') TO ('2026-02-01'); \
    CREATE TABLE notes (line text); \
    CREATE FUNCTION seen() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW;END'; \
    CREATE TRIGGER kept AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION seen(); \
    CREATE TRIGGER \"odd; DROP TABLE notes CASCADE; --\" AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION seen(); \
    ALTER TABLE orders ENABLE ALWAYS TRIGGER \"odd; DROP TABLE notes CASCADE; --\"; \
    INSERT INTO goods SELECT g, 'g' || g, g FROM generate_series(1, 200) g; \
    INSERT INTO orders (goods) SELECT 1 + g % 200 FROM generate_series(1, 500) g; \
    INSERT INTO events SELECT '2026-01-01'::date + g % 31, 'e' || g FROM generate_series(1, 100) g; \
    INSERT INTO notes SELECT 'n' || g % 7 FROM generate_series(1, 50) g";

/// Statements of an administrator, in order. Rows are written between them and beside them.
const CHANGES: [&str; 66] = [
    "CREATE TABLE fresh (id int PRIMARY KEY, note text); INSERT INTO fresh SELECT g, 'f' FROM generate_series(1, 30) g",
    "INSERT INTO fresh VALUES (31, 'later'); UPDATE fresh SET note = 'changed' WHERE id = 3; DELETE FROM fresh WHERE id = 4",
    "CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')",
    "INSERT INTO events VALUES ('2026-02-03', 'in the new part')",
    "ALTER TABLE goods ADD COLUMN stock int NOT NULL DEFAULT 7",
    "ALTER TABLE orders DISABLE TRIGGER kept; ALTER TABLE goods ADD COLUMN tags text[] DEFAULT '{a,\"b c\"}'",
    "CREATE TABLE series (id int GENERATED ALWAYS AS IDENTITY, at date NOT NULL) PARTITION BY RANGE (at)",
    "CREATE TABLE series_1 PARTITION OF series FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
    "INSERT INTO series (at) VALUES ('2026-02-02'); ALTER TABLE series ADD COLUMN note text DEFAULT 'a \"quoted\" one'",
    "INSERT INTO series (at) VALUES ('2026-02-03'); ALTER TABLE series ADD COLUMN more int",
    "UPDATE goods SET stock = 8 WHERE id % 3 = 0; INSERT INTO goods (id, name, price) VALUES (1001, 'new', 3)",
    "ALTER TABLE goods ALTER stock SET DEFAULT 9",
    "ALTER TABLE goods ADD COLUMN doubled int GENERATED ALWAYS AS (stock * 2) STORED",
    "ALTER TABLE orders ADD COLUMN placed timestamptz DEFAULT now(), ADD COLUMN token uuid DEFAULT gen_random_uuid()",
    "INSERT INTO orders (goods) VALUES (5), (6)",
    "ALTER TYPE mood ADD VALUE 'fine' BEFORE 'bad'",
    "UPDATE goods SET feels = 'fine' WHERE id < 20",
    "ALTER TABLE goods ALTER name TYPE varchar(40)",
    "UPDATE goods SET name = 'a name of more than ten' WHERE id = 7",
    "ALTER TABLE goods DROP COLUMN was CASCADE",
    "UPDATE goods SET price = price + 1 WHERE id < 50",
    "ALTER TABLE goods RENAME COLUMN name TO title",
    "UPDATE goods SET title = 'renamed' WHERE id = 9",
    "ALTER TABLE goods ALTER title TYPE varchar(40) USING upper(title)",
    "ALTER TABLE goods ALTER tags DROP DEFAULT, ALTER tags TYPE jsonb USING to_jsonb(tags)",
    "CREATE INDEX CONCURRENTLY by_title ON goods (title)",
    "CREATE UNIQUE INDEX only_once ON goods (lower(title), id)",
    "DROP INDEX by_count",
    "REINDEX TABLE orders",
    "ALTER TABLE goods DROP CONSTRAINT goods_price_check",
    "UPDATE goods SET price = -1 WHERE id = 11",
    "ALTER TABLE goods ADD CONSTRAINT low CHECK (price > -10), ADD CONSTRAINT lower_still CHECK (price > -20) NOT VALID",
    "CREATE OR REPLACE FUNCTION doubled(n int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT n + n'",
    "DROP FUNCTION doubled; CREATE FUNCTION doubled(n int) RETURNS bigint LANGUAGE sql AS 'SELECT n * 2::bigint'",
    "CREATE OR REPLACE VIEW dear AS SELECT id, price, title FROM goods WHERE price > 20",
    "DROP VIEW dear; CREATE VIEW dear AS SELECT title FROM goods; COMMENT ON VIEW dear IS 'it IS one'",
    "ALTER TABLE goods ALTER price TYPE double precision",
    "UPDATE goods SET price = 2.5 WHERE id = 12",
    "COMMENT ON VIEW dear IS NULL; COMMENT ON COLUMN goods.title IS E'two\\nlines'",
    "GRANT SELECT ON goods TO guest; GRANT UPDATE (title) ON goods TO guest WITH GRANT OPTION",
    "REVOKE SELECT ON goods FROM guest; GRANT INSERT ON orders TO PUBLIC",
    "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO guest",
    "CREATE TABLE rights (a int)",
    "ALTER TABLE orders ALTER goods SET STATISTICS 55, ALTER count DROP NOT NULL, ALTER count SET STORAGE PLAIN",
    "ALTER TABLE orders SET (fillfactor = 70); ALTER TABLE orders ALTER count DROP DEFAULT",
    "ALTER SEQUENCE tickets INCREMENT 5 MAXVALUE 100000; SELECT nextval('tickets')",
    "ALTER TABLE goods OWNER TO guest",
    "CREATE POLICY mine ON goods FOR SELECT USING (price > 0); ALTER TABLE goods ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE goods DISABLE ROW LEVEL SECURITY; DROP POLICY mine ON goods",
    "CREATE FUNCTION t() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.note := upper(NEW.note);RETURN NEW;END'; \
     CREATE TRIGGER up BEFORE INSERT ON fresh FOR EACH ROW EXECUTE FUNCTION t()",
    "INSERT INTO fresh VALUES (50, 'by trigger'); ALTER TABLE fresh ENABLE ALWAYS TRIGGER up; INSERT INTO fresh VALUES (51, 'x')",
    "ALTER TABLE fresh RENAME TO fresher; INSERT INTO fresher VALUES (60, 'renamed')",
    "CREATE SCHEMA more; ALTER TABLE notes SET SCHEMA more; INSERT INTO more.notes VALUES ('moved')",
    "UPDATE more.notes SET line = 'all' WHERE line = 'n3'; DELETE FROM more.notes WHERE line = 'n4'",
    "ALTER TABLE more.notes ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY; ALTER TABLE more.notes ADD PRIMARY KEY (id)",
    "INSERT INTO more.notes (line) VALUES ('numbered'); UPDATE more.notes SET line = 'n' WHERE id = 2",
    "ALTER TABLE orders DROP CONSTRAINT orders_goods_fkey; INSERT INTO orders (goods) VALUES (99999)",
    "DELETE FROM orders WHERE goods = 99999; ALTER TABLE orders ADD CONSTRAINT again FOREIGN KEY (goods) REFERENCES goods",
    "ALTER TABLE events ADD COLUMN size int DEFAULT 4; INSERT INTO events VALUES ('2026-01-09', 'sized', 5)",
    "ALTER TABLE events DETACH PARTITION events_1; DROP TABLE events_2; \
     CREATE TABLE events_3 PARTITION OF events FOR VALUES FROM ('2026-03-01') TO ('2026-04-01')",
    "CREATE MATERIALIZED VIEW summed AS SELECT sum(count) AS n FROM orders",
    "CREATE DOMAIN short AS text CHECK (length(VALUE) < 9); CREATE TABLE of_domain (v short); INSERT INTO of_domain VALUES ('x')",
    "CREATE EXTENSION citext; CREATE TABLE mails (m citext PRIMARY KEY); INSERT INTO mails VALUES ('A@b')",
    "DROP TABLE rights; TRUNCATE of_domain; INSERT INTO of_domain VALUES ('y')",
    "ALTER DATABASE shop SET work_mem = '5MB'; COMMENT ON DATABASE shop IS 'the shop'; GRANT CREATE ON DATABASE shop TO guest",
    "CREATE STATISTICS st ON goods, count FROM orders; CREATE CAST (mood AS int) WITH INOUT",
];

/// A client that writes all the time; a definition may make one of its statements fail.
struct Writing {
    over: Arc<AtomicBool>,
    writer: std::thread::JoinHandle<usize>,
}

impl Writing {
    fn begin(bench: &Arc<Bench>) -> Writing {
        let (bench, over) = (Arc::clone(bench), Arc::new(AtomicBool::new(false)));
        let is_over = Arc::clone(&over);
        let writer = std::thread::spawn(move || {
            let mut written = 0;
            while !is_over.load(Relaxed) {
                let sql = format!(
                    "INSERT INTO orders (goods) SELECT 1 + {written} % 200; UPDATE orders SET count = coalesce(count, 0) + 1 \
                     WHERE id % 50 = {written} % 50; UPDATE goods SET price = price + 1 WHERE id = 100 + {written} % 100"
                );
                written += usize::from(bench.source.try_sql("shop", &sql).is_ok());
            }
            written
        });
        Writing { over, writer }
    }

    /// Ends it; returns the number of statements that succeeded.
    fn end(self) -> usize {
        self.over.store(true, Relaxed);
        self.writer.join().unwrap()
    }
}

/// Makes changes one statement after another.
pub(super) fn define(bench: &Bench, changes: &[&str]) {
    for statement in changes.iter().flat_map(|sql| sql.split("; ")) {
        bench.source.sql("shop", statement);
    }
}

/// Options for [`PROVIDER_ROLES`]: a role that is no superuser on either side.
fn as_mover(bench: &Bench) -> Options {
    bench.options_as("user=mover dbname=shop", None)
}

/// Defines as the role that owns the database; returns the statements that only a superuser may run.
fn define_as_owner(bench: &Bench, changes: &[&str]) -> Vec<String> {
    let statements = changes.iter().flat_map(|sql| sql.split("; "));
    let refused = |statement: &&str| {
        // A role without BYPASSRLS cannot read such a table any more: that ends a migration by name.
        if statement.contains("FORCE ROW") {
            return true;
        }
        let mut psql = bench.source.client("psql");
        psql.env("PGUSER", "app").args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", "shop", "-c", statement]);
        let output = psql.output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            println!("not by the owner: {statement}: {told}");
        }
        !output.status.success()
    };
    statements.filter(refused).map(str::to_owned).collect()
}

/// Runs a command that holds, changes definitions while clients write, and orders the switch.
async fn move_while_defining(bench: Arc<Bench>, changes: &[&str], pause_ms: u64) {
    let options = Options { share: 0.0, ..bench.options("shop") };
    move_with(bench, options, changes, pause_ms, |bench, sql| define(bench, &[sql])).await;
}

/// Runs the command with some options; `define` makes one group of changes.
pub(super) async fn move_with(
    bench: Arc<Bench>,
    options: Options,
    changes: &[&str],
    pause_ms: u64,
    mut define: impl FnMut(&Bench, &str),
) {
    let options = Options { hold: true, ..options };
    let redefined = Arc::new(std::sync::Mutex::new(Vec::new()));
    let observer: Observer = Arc::new({
        let redefined = Arc::clone(&redefined);
        move |event: Event| {
            println!("{:?}", event.kind);
            if let EventKind::Migrate(migrate::Event::Redefining { changes }) = &event.kind {
                redefined.lock().unwrap().extend(changes.clone());
            }
        }
    });
    let holder = std::thread::spawn({
        let options = options.clone();
        move || {
            let ended = tokio::runtime::Runtime::new().unwrap().block_on(run(&options, observer));
            ended.unwrap_or_else(|failure| panic!("{failure:?}"))
        }
    });
    let begun = std::time::Instant::now();
    while status(&options).await.unwrap().holding.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60) && !holder.is_finished(), "it holds");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let writing = Writing::begin(&bench);
    for sql in changes {
        define(&bench, sql);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    }
    assert!(writing.end() > 10);
    order_switch(&options, &SwitchOrder::default()).await.unwrap();
    let outcome = tokio::task::spawn_blocking(|| holder.join().unwrap()).await.unwrap();
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert!(!redefined.lock().unwrap().is_empty());
    bench.look_into_source("shop");
    assert_eq!(sums(&bench.source, "shop"), sums(&bench.target, "shop"));
}

fn bench_of(target: Option<u32>) -> Bench {
    let bench = match target {
        Some(major) => Bench::to_newer(major, &[]),
        None => Bench::start(),
    };
    for cluster in [&bench.source, &bench.target] {
        cluster.sql("postgres", "CREATE ROLE guest");
    }
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", SETUP);
    bench
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_defined_while_a_target_follows_arrives_with_its_rows() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench_of(None));
    move_while_defining(Arc::clone(&bench), &CHANGES, 60).await;
    assert_eq!(dumped(&bench, &bench.source), dumped(&bench, &bench.target));
    // The way back is one of all tables.
    let target = |sql: &str| drop(bench.target.sql("shop", sql));
    target(
        "INSERT INTO fresher VALUES (70, 'on the target'); UPDATE more.notes SET line = 'on the target' WHERE id < 5",
    );
    target(
        "INSERT INTO events VALUES ('2026-03-03', 'on the target', 3); DELETE FROM mails; UPDATE goods SET stock = 1",
    );
    let options = Options { share: 0.0, ..bench.options("shop") };
    fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.source.sql("shop", "SELECT note FROM fresher WHERE id = 70"), "ON THE TARGET");
    let counts = "SELECT (SELECT count(*) FROM more.notes WHERE line = 'on the target'), (SELECT count(*) FROM mails), \
                  (SELECT count(*) FROM events_3), (SELECT count(*) FROM goods WHERE stock = 1 AND doubled = 2) = \
                  (SELECT count(*) FROM goods)";
    assert_eq!(bench.source.sql("shop", counts), "4|0|1|t");
}

/// The type stays as it was, and the log shows nothing of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_are_written_again_by_alter_table_are_copied() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench_of(None));
    let change = "ALTER TABLE notes ALTER line TYPE text USING upper(line)";
    move_while_defining(Arc::clone(&bench), &[change, "INSERT INTO notes VALUES ('later')"], 1500).await;
}

/// With the programs of the newer version; without them it ends by name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_server_gets_what_is_defined_too() {
    if !newer_available() {
        return;
    }
    let bench = Arc::new(bench_of(Some(NEWER_MAJOR)));
    if (NEWER_MAJOR..NEWER_MAJOR + 9)
        .any(|major| Path::new(&format!("/usr/lib/postgresql/{major}/bin/pg_dump")).exists())
    {
        return move_while_defining(bench, &CHANGES, 20).await;
    }
    let options = Options { share: 0.0, ..bench.options("shop") };
    let making = Arc::clone(&bench);
    let observer: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            making.source.sql("shop", CHANGES[0]);
        }
    });
    let failure = run(&options, observer).await.unwrap_err();
    let told = failure.to_string();
    assert!(told.contains("new table public.fresh") && told.contains("pg_dump of version 17"), "{told}");
    bench.assert_clean("shop");
}

/// A command that is killed in the middle of a round leaves a target that the next one brings to the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_round_that_is_ended_in_its_middle_is_made_again() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench_of(None));
    let options = Options { share: 0.0, ..bench.options("shop") };
    let writing = Writing::begin(&bench);
    let delays = [50, 300, 900];
    for (delay, changes) in delays.into_iter().zip(CHANGES.chunks(CHANGES.len().div_ceil(delays.len()))) {
        let told = Arc::new(tokio::sync::Notify::new());
        let (telling, acting) = (Arc::clone(&told), Arc::clone(&bench));
        let (changes, once) = (changes.to_vec(), std::sync::Once::new());
        let observer: Observer = Arc::new(move |event: Event| {
            println!("{:?}", event.kind);
            match &event.kind {
                EventKind::PhaseStarted { phase, .. } if phase == "compare" => {
                    once.call_once(|| define(&acting, &changes))
                }
                EventKind::PhaseStarted { phase, .. } if phase == "definitions" => telling.notify_one(),
                _ => {}
            }
        });
        let killed = async {
            told.notified().await;
            tokio::time::sleep(Duration::from_millis(delay)).await;
        };
        let holding = Options { hold: true, ..options.clone() };
        tokio::select! {
            biased;
            () = killed => println!("killed after {delay} ms"),
            ended = run(&holding, observer) => panic!("{ended:?}"),
        }
    }
    assert!(writing.end() > 10);
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    bench.look_into_source("shop");
    assert_eq!(sums(&bench.source, "shop"), sums(&bench.target, "shop"));
    assert_eq!(dumped(&bench, &bench.source), dumped(&bench, &bench.target));
}

/// Changes of kinds that are rarer, each made of what the one before left.
const RARER_CHANGES: [&str; 52] = [
    "CREATE TABLE parent (id int PRIMARY KEY, a text); CREATE TABLE child () INHERITS (parent)",
    "INSERT INTO parent VALUES (1, 'p'); INSERT INTO child VALUES (2, 'c')",
    "ALTER TABLE parent ADD COLUMN added int DEFAULT 5; UPDATE parent SET a = 'both'",
    "ALTER TABLE parent DROP COLUMN a; INSERT INTO child (id) VALUES (4)",
    "CREATE TYPE pair AS (x int, y text); CREATE TABLE of_pair (id int PRIMARY KEY, p pair, ps pair[])",
    "INSERT INTO of_pair VALUES (1, '(1,a)', ARRAY['(2,b)'::pair]); ALTER TYPE mood RENAME VALUE 'bad' TO 'worse'",
    "UPDATE goods SET feels = 'worse' WHERE id < 9; ALTER TYPE mood ADD VALUE 'worst'",
    "CREATE FUNCTION priced(g goods) RETURNS numeric LANGUAGE sql STABLE AS 'SELECT g.price'",
    "CREATE FUNCTION next_code() RETURNS int LANGUAGE sql AS $$SELECT nextval('tickets')::int$$",
    "ALTER TABLE goods ADD COLUMN code int DEFAULT next_code(); UPDATE goods SET code = 3 WHERE id = 3",
    "ALTER TABLE goods ALTER code SET DEFAULT 0; DROP FUNCTION next_code()",
    "ALTER TABLE goods DROP COLUMN code; ALTER TABLE goods ADD COLUMN code text; UPDATE goods SET code = 'c' WHERE id = 4",
    "ALTER TABLE orders DROP CONSTRAINT orders_pkey; ALTER TABLE orders ADD CONSTRAINT other_key PRIMARY KEY (id, goods)",
    "UPDATE orders SET goods = 8 WHERE id = 17; DELETE FROM orders WHERE id = 18",
    "ALTER TABLE orders REPLICA IDENTITY FULL; UPDATE orders SET count = 99 WHERE id = 19",
    "ALTER TABLE notes ADD COLUMN n int; UPDATE notes SET n = 1; ALTER TABLE notes ALTER n SET NOT NULL",
    "CREATE TABLE swap_a (v text PRIMARY KEY); CREATE TABLE swap_b (v text PRIMARY KEY)",
    "INSERT INTO swap_a VALUES ('a'); INSERT INTO swap_b VALUES ('b'), ('b2')",
    "ALTER TABLE swap_a RENAME TO swap_c; ALTER TABLE swap_b RENAME TO swap_a; ALTER TABLE swap_c RENAME TO swap_b",
    "INSERT INTO swap_a VALUES ('into what was b'); INSERT INTO swap_b VALUES ('into what was a')",
    "ALTER INDEX by_count RENAME TO by_number; ALTER TABLE swap_a RENAME CONSTRAINT swap_b_pkey TO a_key",
    "CREATE TABLE loose (at date NOT NULL, what text); INSERT INTO loose VALUES ('2026-05-05', 'before it is a part')",
    "ALTER TABLE events ATTACH PARTITION loose FOR VALUES FROM ('2026-05-01') TO ('2026-06-01')",
    "INSERT INTO events VALUES ('2026-05-06', 'after'); CREATE INDEX ON events (what)",
    "ALTER TABLE events ADD PRIMARY KEY (at, what); DELETE FROM events WHERE what = 'e5'",
    "CREATE TABLE events_rest PARTITION OF events DEFAULT; INSERT INTO events VALUES ('2027-01-01', 'rest')",
    "CREATE SCHEMA area; CREATE TABLE area.inside (id serial PRIMARY KEY); INSERT INTO area.inside DEFAULT VALUES",
    "ALTER SCHEMA area RENAME TO region; INSERT INTO region.inside DEFAULT VALUES",
    "CREATE COLLATION plain (locale = 'C'); ALTER TABLE notes ALTER line TYPE text COLLATE plain",
    "CREATE RULE shadow AS ON INSERT TO region.inside DO ALSO INSERT INTO notes (line, n) VALUES ('by rule', 1)",
    "INSERT INTO region.inside DEFAULT VALUES; ALTER TABLE region.inside ENABLE REPLICA RULE shadow",
    "CREATE AGGREGATE summed (int) (SFUNC = int4pl, STYPE = int, INITCOND = '0')",
    "CREATE OPERATOR === (LEFTARG = int, RIGHTARG = int, FUNCTION = int4eq)",
    "CREATE FOREIGN DATA WRAPPER far; CREATE SERVER there FOREIGN DATA WRAPPER far OPTIONS (a 'b')",
    "ALTER SERVER there OPTIONS (SET a 'c'); CREATE USER MAPPING FOR guest SERVER there OPTIONS (password 'x')",
    "CREATE FOREIGN TABLE afar (a int) SERVER there; ALTER FOREIGN TABLE afar ADD COLUMN b text",
    "CREATE TEXT SEARCH CONFIGURATION words (COPY = simple); CREATE STATISTICS both_of ON id, goods FROM orders",
    "DROP VIEW dear; ALTER TABLE goods ADD COLUMN other text",
    "CREATE VIEW low AS SELECT id FROM goods; CREATE VIEW lower_still AS SELECT id FROM low WHERE id < 5",
    "CREATE OR REPLACE VIEW low WITH (security_barrier) AS SELECT id, code FROM goods; GRANT SELECT ON low TO guest",
    "ALTER VIEW low RENAME TO lowest; DROP VIEW lower_still",
    "CREATE FUNCTION u() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW;END'",
    "CREATE TRIGGER watch AFTER UPDATE OF price ON goods FOR EACH ROW WHEN (OLD.price < NEW.price) EXECUTE FUNCTION u()",
    "DROP TRIGGER watch ON goods; ALTER TABLE goods ALTER price TYPE numeric(12, 2) USING price",
    "CREATE TRIGGER watch AFTER UPDATE OF price ON goods FOR EACH ROW WHEN (OLD.price < NEW.price) EXECUTE FUNCTION u()",
    "ALTER TABLE goods DISABLE TRIGGER watch",
    "CREATE POLICY seen ON goods USING (price > 0); ALTER TABLE goods ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    "DROP TABLE of_pair; DROP TYPE pair; CREATE UNLOGGED SEQUENCE quick",
    "CREATE DOMAIN few AS int CHECK (VALUE < 9); CREATE TABLE of_few (id int PRIMARY KEY, f few); INSERT INTO of_few VALUES (1, 8)",
    "ALTER DOMAIN few DROP CONSTRAINT few_check; INSERT INTO of_few VALUES (2, 10); ALTER DOMAIN few ADD CHECK (VALUE < 20)",
    "CREATE TABLE late_child (id int NOT NULL, added int); INSERT INTO late_child VALUES (7, 7); ALTER TABLE late_child INHERIT parent",
    "ALTER DEFAULT PRIVILEGES IN SCHEMA region GRANT SELECT ON TABLES TO guest; CREATE TABLE region.later (a int)",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "full tier: a second list of changes, half a minute; the first list has one change of each common kind"]
async fn rarer_definitions_arrive_too() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench_of(None));
    move_while_defining(Arc::clone(&bench), &RARER_CHANGES, 250).await;
    assert_eq!(dumped(&bench, &bench.source), dumped(&bench, &bench.target));
}

/// New tables, partitions and indexes take no lock that the copy would have to give way to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_defined_while_rows_are_copied_arrives() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench_of(None));
    let acting = Arc::clone(&bench);
    let once = std::sync::Once::new();
    let observer: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "indexes") {
            once.call_once(|| {
                let changes = [
                    CHANGES[2],
                    CHANGES[3],
                    "CREATE TABLE lines (id int PRIMARY KEY, part int CONSTRAINT of_goods REFERENCES goods)",
                    "COMMENT ON CONSTRAINT of_goods ON lines IS 'x'; INSERT INTO lines VALUES (1, 5), (2, 6)",
                    "CREATE INDEX by_name ON goods (name); CREATE VIEW cheap AS SELECT id FROM goods WHERE price < 3",
                ];
                define(&acting, &changes);
            });
        }
    });
    let options = Options { share: 0.0, ..bench.options("shop") };
    run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.look_into_source("shop");
    assert_eq!(sums(&bench.source, "shop"), sums(&bench.target, "shop"));
    assert_eq!(dumped(&bench, &bench.source), dumped(&bench, &bench.target));
}

/// Both lists once more, by roles as hosting providers give them: what is left of them when a superuser is needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "full tier: both lists again, more than a minute"]
async fn definitions_of_an_owner_arrive_by_a_role_that_is_no_superuser() {
    if !available() {
        return;
    }
    for (changes, pause_ms) in [(&CHANGES[..], 60), (&RARER_CHANGES[..], 250)] {
        let bench = Arc::new(Bench::start());
        for cluster in [&bench.source, &bench.target] {
            cluster.sql("postgres", "CREATE ROLE guest");
            cluster.sql("postgres", PROVIDER_ROLES);
        }
        bench.source.sql("postgres", "CREATE DATABASE shop OWNER app");
        bench.source.sql("shop", &format!("SET ROLE app; {SETUP}"));
        let mut refused = Vec::new();
        let options = as_mover(&bench);
        move_with(Arc::clone(&bench), options, changes, pause_ms, |bench, sql| {
            refused.extend(define_as_owner(bench, &[sql]));
        })
        .await;
        assert_eq!(dumped(&bench, &bench.source), dumped(&bench, &bench.target));
        println!("{} statements need a superuser", refused.len());
    }
}
