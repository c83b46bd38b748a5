//! Throughput of many clients over few server connections: the proxy's own pool against pgbouncer's, in turns.

use crate::native::{self, Pgbouncer};
use crate::{Raw, against, cluster, of_rounds, spread};
use stillpoint_migrate_tests::Testbed;

/// Server connections of each pool.
pub(crate) const SERVERS: usize = 20;
const CLIENTS: [&str; 2] = ["64", "256"];
const SECONDS: &str = "8";
/// Scripts of pgbench: its options, and their names.
const LOADS: [(&str, &str); 2] = [("-S", "select"), ("-N", "update")];

/// Throughput of one load with one number of clients.
#[derive(Default)]
struct Cell {
    direct: Vec<f64>,
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

pub(crate) fn measure(rounds: usize) -> Raw {
    let mut testbed = Testbed::direct(cluster(), cluster());
    pool_connections(&mut testbed);
    testbed.source.pgbench("shop", &["-i", "-s", "10", "-q"]);
    let pgbouncer = native::available().then(|| Pgbouncer::start_with(&testbed.source, SERVERS));
    let cells: Vec<_> = LOADS.iter().flat_map(|load| CLIENTS.map(|clients| (*load, clients))).collect();
    let mut results: Vec<Cell> = cells.iter().map(|_| Cell::default()).collect();
    for round in 0..rounds {
        for (((option, _), clients), cell) in cells.iter().zip(&mut results) {
            stillpoint_testing::test_timeout::start();
            let run = |port: u16| transactions_per_second(&testbed, port, option, clients);
            let mut turns: Vec<(u16, &mut Vec<f64>)> =
                vec![(testbed.source.port(), &mut cell.direct), (testbed.port(), &mut cell.ours)];
            if let Some(pgbouncer) = &pgbouncer {
                turns.push((pgbouncer.port(), &mut cell.theirs));
            }
            // Each is first in some rounds.
            turns.rotate_left(round % 2);
            for (port, values) in turns {
                values.push(run(port));
            }
        }
    }
    println!("## Many clients over {SERVERS} server connections: pgbench without think time, {SECONDS} s each\n");
    println!(
        "| script | clients | direct, tps | stillpoint with a pool | pgbouncer, transaction | stillpoint : pgbouncer |"
    );
    println!("|---|---|---|---|---|---|");
    let mut raw = Raw::new();
    for (((_, name), clients), cell) in cells.into_iter().zip(results) {
        println!(
            "| {name} | {clients} | {} | {} | {} | {} |",
            spread(&cell.direct),
            spread(&cell.ours),
            spread(&cell.theirs),
            against(&cell.ours, &cell.theirs)
        );
        for (whose, values) in [("direct", cell.direct), ("stillpoint", cell.ours), ("pgbouncer", cell.theirs)] {
            raw.push((format!("pool, {name}, {clients} clients, {whose}"), values));
        }
    }
    println!("\n{}. Servers, pools and clients share the machine.\n", of_rounds(rounds));
    raw
}

/// Starts the proxy again with a pool.
fn pool_connections(testbed: &mut Testbed) {
    testbed.kill_proxy();
    let text = std::fs::read_to_string(testbed.config()).expect("read the configuration");
    let pool = format!("[tenants.shop]\npool = {{ servers = {SERVERS} }}\n");
    let changed = text.replace("[tenants.shop]\n", &pool);
    assert_ne!(text, changed);
    std::fs::write(testbed.config(), changed).expect("write the configuration");
    testbed.start_proxy();
}

fn transactions_per_second(testbed: &Testbed, port: u16, option: &str, clients: &str) -> f64 {
    let arguments = ["-n", option, "-c", clients, "-j", "2", "-T", SECONDS];
    let outcome = testbed.source.pgbench_load("shop", port, &arguments).finish();
    assert!(outcome.success, "{}", outcome.text);
    let value = outcome.text.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
    value.unwrap_or_else(|| panic!("no rate: {}", outcome.text))
}
