//! PostgreSQL's own regression tests while a target follows: afterwards the dumps of both sides are equal.
//!
//! A migration carries no DDL, and those tests are full of it. So each file is split (`regress/script.rs`). Definitions
//! are run before the migration, without any DROP; statements that write or read rows are run by psql through the proxy
//! while the target follows, errors included. The short form takes some files; `STILLPOINT_SOAK=1` takes all of them
//! and writes the page; `STILLPOINT_REGRESS=FILE,FILE` takes others. Images of rows cannot carry everything: there a
//! file may also end the migration by name.

mod file_migration;
mod page;
mod script;

use file_migration::{FileResult, Servers};
use std::sync::OnceLock;
use stillpoint_migrate_engine::Capture;
use stillpoint_testing::Unavailable;
use stillpoint_testing::postgresql::{Regression, available};
use stillpoint_testing::soak::{cases_of_part, is_soak};

const SHORT: &[&str] = &["insert_conflict", "update", "delete", "returning", "identity", "generated"];
/// Two files that finish, and two with statements that prevent it.
const SHORT_IMAGES: &[&str] = &["delete", "boolean", "returning", "copy"];

/// Files that need others before them, according to the schedule.
const NEEDED: &[(&str, &[&str])] = &[
    ("multirangetypes", &["rangetypes"]),
    ("geometry", &["point", "lseg", "line", "box", "path", "polygon", "circle"]),
    ("horology", &["date", "time", "timetz", "timestamp", "timestamptz", "interval"]),
    ("aggregates", &["create_aggregate"]),
    ("join", &["create_misc"]),
    ("psql", &["create_am"]),
    ("select_parallel", &["create_misc"]),
    ("select_views", &["create_misc", "create_view"]),
    ("with", &["create_misc"]),
];

const CHANGED: &str = "definitions changed during the migration";

/// Files after which the sides differ, each with a text from the result: not carried, refused, or ends the migration.
const EXCEPTIONS: &[(&str, &str)] = &[
    // Statements in functions, or in EXPLAIN; `rowsecurity`, once split, drops its own definitions.
    ("alter_table", CHANGED),
    ("create_index", CHANGED),
    ("event_trigger", CHANGED),
    ("plpgsql", CHANGED),
    ("rowsecurity", CHANGED),
    ("select_into", CHANGED),
    // Bytes that are no text in the database's encoding.
    ("encoding", "invalid byte sequence"),
    ("object_address", "refused: subscription"),
    ("subscription", "refused: subscription"),
    // Once split, it leaves transactions prepared.
    ("temp", "waiting for prepared transactions"),
    // The output of `pg_dump` cannot be restored.
    ("alter_generic", "extension \"alt_lang2\" is not available"),
    ("foreign_data", "invalid option"),
    ("foreign_key", "constraint \"fk_a_fkey4\" for relation \"fk\" already exists"),
    // A function of an index finds others only by the caller's search path.
    ("vacuum", "function do_analyze() does not exist"),
];

static REGRESSION: OnceLock<Result<Regression, Unavailable>> = OnceLock::new();

fn regression() -> Result<Regression, Unavailable> {
    Regression::fetch(&stillpoint_testing::workspace_root().join("crates/migrate/tests/regress/fetch"))
}

fn of<'a, T: ?Sized>(table: &[(&str, &'a T)], name: &str) -> Option<&'a T> {
    table.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_log_tells_leaves_both_sides_equal() {
    carry(Capture::Log, SHORT, |file_result| file_result.fault(of(EXCEPTIONS, &file_result.name))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_images_of_rows_tell_leaves_both_sides_equal_or_ends_the_migration_by_name() {
    carry(Capture::Rows, SHORT_IMAGES, FileResult::silent).await;
}

async fn carry(capture: Capture, short: &[&str], fault: impl Fn(&FileResult) -> Option<String>) {
    if !available() {
        return;
    }
    let regression = match REGRESSION.get_or_init(regression) {
        Ok(regression) => regression,
        Err(why) => return stillpoint_testing::skipped(why),
    };
    let order = regression.schedule();
    let names: Vec<String> = match std::env::var("STILLPOINT_REGRESS") {
        Ok(names) => names.split(',').map(str::to_owned).collect(),
        Err(_) if is_soak() => cases_of_part(order.clone()),
        Err(_) => short.iter().map(ToString::to_string).collect(),
    };
    let (mut servers, mut all, mut faults) = (None, Vec::new(), Vec::new());
    for name in &names {
        let at = servers.take().unwrap_or_else(|| Servers::start(regression, capture));
        let file_result = at.carry(name, of(NEEDED, name).unwrap_or_default()).await;
        println!("CARRIED {file_result:?}");
        // A failure must not affect the next file.
        servers = file_result.outcome.is_equal().then_some(at);
        faults.extend(fault(&file_result));
        all.push(file_result);
        if is_soak() {
            page::write(&all, &order, capture);
        }
    }
    let wrote: usize = all.iter().map(|file_result| file_result.wrote).sum();
    let equal = all.iter().filter(|file_result| file_result.outcome.is_equal()).count();
    println!("COUNT files {}\nCOUNT equal {equal}\nCOUNT writes {wrote}", all.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(is_soak() || equal > 0 && wrote > 50, "{equal} equal, {wrote} writes");
}
