//! MariaDB with quiescence points under external load generators: sysbench OLTP, go-tpc's TPC-C and CH-benCHmark, both
//! connection policies. Counts the operations; `make soak` keeps the counts, `experiments/mariadb-counts` adds them up.

use std::fmt::Display;
use stillpoint_patch_tests::mariadb::annotation::{Annotated, annotated};
use stillpoint_patch_tests::mariadb::client::Client;
use stillpoint_patch_tests::mariadb::client_loop::ClientLoop;
use stillpoint_patch_tests::mariadb::effect::{half, in_mode, is_half, there_and_back};
use stillpoint_patch_tests::mariadb::load::{Sysbench, SysbenchCounts, Transactions};
use stillpoint_patch_tests::mariadb::tpc::{self, LoadKind, Tpc};
use stillpoint_patch_tests::mariadb::{MariaDb, Policy};
use stillpoint_patch_tests::victim::{apply, residue, revert, rounds};
use stillpoint_patch_tests::{skip, wait};

/// Number of groups in the paper, which clients have to share.
const POOL: &str = "--thread-pool-size=3";
/// Rounds of the long form: with two loads and two policies 1,024 global patchings, and 1,024 others.
const LONG_FORM_ROUNDS: usize = 64;

macro_rules! or_skip {
    ($what:expr) => {
        match $what {
            Ok(what) => what,
            Err(why) => skip!(why),
        }
    };
}

/// Prints a line that `make soak` keeps with the step.
fn count(what: &str, number: impl Display) {
    println!("COUNT {what} {number}");
}

/// Clients in addition to the load; the test checks each of their answers.
struct Watch {
    transactions: Transactions,
    visitors: ClientLoop,
    client: Client,
    aborted: u64,
}

impl Watch {
    fn start(mariadb: &MariaDb) -> Watch {
        let (transactions, visitors) = (Transactions::start(mariadb, 2), ClientLoop::visitors(mariadb));
        Watch { transactions, visitors, client: mariadb.client(), aborted: mariadb.status("Aborted_clients") }
    }

    /// Waits until old and new connections were served.
    fn served(&self) {
        self.transactions.answered(10);
        self.visitors.more(2);
    }

    /// Asserts that the server lost no connection; one that its client closed in order does not count.
    #[track_caller]
    fn assert_none_lost(&self, mariadb: &MariaDb) {
        assert_eq!(mariadb.status("Aborted_clients"), self.aborted, "connections were lost");
    }

    #[track_caller]
    fn assert_clean(self, mariadb: &mut MariaDb) {
        count("statements-watched", self.transactions.assert_clean());
        count("new-connections", self.visitors.assert_clean());
        mariadb.assert_running();
        assert_eq!(residue(mariadb.pid()), Vec::<String>::new());
    }
}

/// Patches and reverts in each mode, in global mode as often as in all others together.
fn patchings(server: &Annotated, mariadb: &MariaDb, watch: &mut Watch, mut after_each: impl FnMut()) {
    let patch = half(server);
    let wanted = rounds(1, LONG_FORM_ROUNDS);
    for round in 0..wanted {
        for mode in ["global", "local", "global", "probe"] {
            println!("round {round}, {mode}");
            there_and_back(mariadb, patch, &mut watch.client, mode);
            watch.served();
            after_each();
        }
    }
    count("global", 4 * wanted);
    count("local", 2 * wanted);
    count("probe", 2 * wanted);
}

fn under_sysbench(policy: Policy) {
    const CLIENTS: u32 = 8;
    const SECONDS: u32 = 10;
    let server = or_skip!(annotated());
    let mut mariadb = server.packaged.start(policy, &[POOL]);
    let mut watch = Watch::start(&mariadb);
    let mut sysbench = Some(or_skip!(Sysbench::start(&mariadb, CLIENTS, SECONDS)));
    let mut total = SysbenchCounts::default();
    patchings(server, &mariadb, &mut watch, || {
        if let Some(ended) = sysbench.take_if(|sysbench| !sysbench.runs()) {
            total += ended.finish();
            sysbench = Some(Sysbench::again(&mariadb, CLIENTS, SECONDS).unwrap_or_else(|e| panic!("{e}")));
        }
    });
    total += sysbench.take().expect("it runs").finish();
    watch.assert_none_lost(&mariadb);
    assert!(total.queries > 0 && total.reconnects == 0, "{total:?}");
    count("sysbench-statements", total.queries);
    count("sysbench-dead-locks-of-its-own", total.ignored);
    watch.assert_clean(&mut mariadb);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn sysbench_with_a_thread_per_connection() {
    under_sysbench(Policy::ThreadPerConnection);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn sysbench_with_a_pool() {
    under_sysbench(Policy::Pool);
}

fn under_tpc_c(policy: Policy) {
    let server = or_skip!(annotated());
    or_skip!(tpc::go_tpc());
    let data = tpc::data(&server.packaged).unwrap_or_else(|e| panic!("{e}"));
    let mut mariadb = server.packaged.start_on(&data, policy, &[POOL, tpc::OPTION]);
    let mut watch = Watch::start(&mariadb);
    let mut load = Tpc::start(&mariadb, LoadKind::TpcC, 8).unwrap_or_else(|e| panic!("{e}"));
    wait::until("transactions to be done", || (mariadb.status("Com_stmt_execute") > 1000).then_some(()));
    patchings(server, &mariadb, &mut watch, || load.assert_clean());
    watch.assert_none_lost(&mariadb);
    let said = load.finish();
    assert!(said.done > 0, "{said:?}");
    count("tpc-c-transactions", said.done);
    count("tpc-c-dead-locks-of-its-own", said.circles);
    watch.assert_clean(&mut mariadb);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn tpc_c_with_a_thread_per_connection() {
    under_tpc_c(Policy::ThreadPerConnection);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn tpc_c_with_a_pool() {
    under_tpc_c(Policy::Pool);
}

/// Returns the number of analytical queries in progress.
fn queries(mariadb: &MariaDb) -> u64 {
    // The text is concatenated so that this statement does not find itself.
    let list = "SELECT COUNT(*) FROM INFORMATION_SCHEMA.PROCESSLIST WHERE INFO LIKE CONCAT('%/*PLACE', 'HOLDER*/%')";
    let answer = mariadb.asked(list);
    answer.parse().unwrap_or_else(|_| panic!("a number, not {answer:?}"))
}

/// Runs queries: threads in the middle of a query do not delay a patch by probing. A global one waits for the query,
/// and may abort, which changes nothing.
fn under_ch_benchmark(policy: Policy) {
    let server = or_skip!(annotated());
    or_skip!(tpc::go_tpc());
    let data = tpc::data(&server.packaged).unwrap_or_else(|e| panic!("{e}"));
    let mut mariadb = server.packaged.start_on(&data, policy, &[POOL, tpc::OPTION]);
    let (patch, pid) = (half(server), mariadb.pid());
    let mut watch = Watch::start(&mariadb);
    let mut load = Tpc::start(&mariadb, LoadKind::ChBenchmark, 4).unwrap_or_else(|e| panic!("{e}"));
    let (mut given_up, mut in_queries) = (0, 0);
    let wanted = rounds(1, 6);
    for round in 0..wanted {
        for _ in 0..5 {
            println!("round {round}, probe");
            wait::until("an analytical query to run", || (queries(&mariadb) > 0).then_some(()));
            there_and_back(&mariadb, patch, &mut watch.client, "probe");
            in_queries += u64::from(queries(&mariadb) > 0);
            watch.served();
            load.assert_clean();
        }
        println!("round {round}, global");
        let run = in_mode(apply(patch, pid), "global", "2s");
        match run.code {
            Some(0) => assert_eq!(in_mode(revert(pid), "probe", "60s").code, Some(0)),
            code => {
                assert_eq!(code, Some(4), "{run}");
                given_up += 1;
            }
        }
        assert!(!is_half(&mut watch.client) && !is_half(&mut mariadb.client()));
        watch.served();
        load.assert_clean();
    }
    count("ch-probe", 10 * wanted);
    count("ch-probe-pairs-that-ended-beside-a-query", in_queries);
    count("ch-global", wanted);
    count("ch-global-given-up", given_up);
    watch.assert_none_lost(&mariadb);
    let said = load.finish();
    count("ch-transactions-and-queries", said.done);
    count("ch-dead-locks-of-its-own", said.circles);
    watch.assert_clean(&mut mariadb);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn ch_benchmark_with_a_thread_per_connection() {
    under_ch_benchmark(Policy::ThreadPerConnection);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn ch_benchmark_with_a_pool() {
    under_ch_benchmark(Policy::Pool);
}
