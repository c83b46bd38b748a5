//! Builds every change of ours to MariaDB, applies it to Debian's server under load, checks its effect, reverts it, and
//! prints a table: `cargo run -p stillpoint-patch-bench --bin mariadb [NAME...]`. `mariadb mtr [TEST...]` runs
//! MariaDB's own tests instead, while their servers are patched and reverted. `mariadb counts` adds up the counts of
//! `make soak` under external load generators.
//!
//! It guarantees nothing but the table: a change that cannot be built is a row with the reason.

mod counts;
mod mtr;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use stillpoint_patch_bench::machine::machine;
use stillpoint_patch_tests::mariadb::change::{self, Change};
use stillpoint_patch_tests::mariadb::load::Transactions;
use stillpoint_patch_tests::mariadb::{MariaDb, PackagedServer, Policy, packaged};
use stillpoint_patch_tests::patch_calls::{apply, revert};

/// Result for one change.
struct Row {
    change: Change,
    built: Duration,
    result: Result<String, String>,
    /// Units of the patch: number of functions found in the program byte for byte, and of all.
    units: BTreeMap<String, (u32, u32)>,
}

fn main() {
    let names: Vec<String> = std::env::args().skip(1).collect();
    if names.first().is_some_and(|name| name == "mtr") {
        return mtr::run(&names[1..]);
    }
    if names.first().is_some_and(|name| name == "counts") {
        return counts::print();
    }
    let packaged = packaged().as_ref().unwrap_or_else(|e| panic!("{e}"));
    let changes = change::all().into_iter().filter(|c| names.is_empty() || names.contains(&c.name));
    let mut servers = Policy::ALL.map(|policy| packaged.start(policy, &[]));
    servers.iter().for_each(change::prepare);
    let loads = servers.each_ref().map(|server| Transactions::start(server, 4));
    let dir = tempfile::TempDir::with_prefix("stillpoint-mariadb-").expect("make a directory");
    let mut rows = Vec::new();
    for change in changes {
        let row = attempt(change, packaged, &mut servers, dir.path());
        eprintln!("{:28} {:4} s  {}", row.change.name, row.built.as_secs(), shown(&row));
        rows.push(row);
    }
    let statements: u64 = loads.into_iter().map(Transactions::assert_clean).sum();
    print(packaged, &rows, statements);
}

fn attempt(change: Change, packaged: &PackagedServer, servers: &mut [MariaDb; 2], dir: &Path) -> Row {
    let started = Instant::now();
    let built = change.build(packaged, dir);
    let time = started.elapsed();
    let units = built.as_ref().map(|(patch, _)| units(patch)).unwrap_or_default();
    let result = built.and_then(|(patch, run)| {
        if run.code != Some(0) || !patch.exists() {
            let why = run.stderr.lines().chain(run.stdout.lines()).find(|l| !l.trim().is_empty());
            return Err(why.unwrap_or("nothing to patch").trim_start_matches("error: ").to_owned());
        }
        for server in servers.iter_mut() {
            life(&change, server, &patch)?;
        }
        Ok(run.stdout.lines().next().unwrap_or_default().to_owned())
    });
    Row { change, built: time, result, units }
}

/// Reads from a patch file the units that it was made from.
fn units(patch: &Path) -> BTreeMap<String, (u32, u32)> {
    let Ok(bytes) = std::fs::read(patch) else { return BTreeMap::new() };
    let Ok(signed) = stillpoint_patch_format::decode(&bytes) else { return BTreeMap::new() };
    let units = signed.patch.source.units.iter();
    units.map(|u| (u.path.clone(), (u.functions_placed, u.functions_total))).collect()
}

/// Checks that the change is inactive, active after the apply, and inactive after the revert.
fn life(change: &Change, server: &mut MariaDb, patch: &Path) -> Result<(), String> {
    let expect = |server: &MariaDb, wanted: bool| match change.is_active(server)? {
        state if state == wanted => Ok(()),
        state => Err(format!("the change is active: {state}, expected {wanted}")),
    };
    let pid = server.pid();
    let step = |run: stillpoint_patch_tests::cli::Run| match run.code {
        Some(0) => Ok(()),
        _ => Err(run.stderr.lines().take(2).collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()),
    };
    expect(server, false)?;
    step(apply(patch, pid).run())?;
    let seen = expect(server, true);
    step(revert(pid).run())?;
    server.assert_running();
    seen.and_then(|()| expect(server, false))
}

fn shown(row: &Row) -> String {
    match &row.result {
        Ok(text) => text.split_once(": ").map_or(text.clone(), |(_, rest)| rest.to_owned()),
        Err(why) => format!("not patched: {why}"),
    }
}

fn print(packaged: &PackagedServer, rows: &[Row], statements: u64) {
    let good = rows.iter().filter(|r| r.result.is_ok()).count();
    println!("# Changes of ours to Debian's mariadbd {}, unmodified and running\n", packaged.version);
    println!("Printed by `experiments/mariadb-changes` on {}.\n", machine());
    println!(
        "Each patch was built from single units, applied to a server under load with one thread per connection and to"
    );
    println!(
        "one with a pool of threads, seen to take effect by SQL, and reverted. Meanwhile {statements} statements of the"
    );
    println!("load were answered, none wrongly, none lost.\n");
    println!("{good} of {} changes could be patched.\n", rows.len());
    println!("| change | file | what it does | built in | functions, or why not |\n|---|---|---|---|---|");
    for row in rows {
        let (change, seconds) = (&row.change, row.built.as_secs());
        let result = shown(row).replace('|', "/");
        println!("| {} | {} | {} | {seconds} s | {result} |", change.name, change.file, change.about);
    }
    let units: BTreeMap<_, _> = rows.iter().flat_map(|r| &r.units).collect();
    let whole = units.values().filter(|(placed, total)| placed == total).count();
    println!(
        "\nOf the {} units of these patches {whole} are in the program with every function, byte for byte",
        units.len()
    );
    println!("(relocated places apart). Inline code that another unit's copy stands for is not counted as found.\n");
    println!("| unit | functions found | of |\n|---|---|---|");
    for (unit, (placed, total)) in units {
        println!("| {unit} | {placed} | {total} |");
    }
}
