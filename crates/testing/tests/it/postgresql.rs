//! Clusters of PostgreSQL, as other tests use them.

use stillpoint_testing::postgresql::{Cluster, available};

#[test]
fn a_cluster_lives_crashes_and_comes_back() {
    if !available() {
        return;
    }
    let mut cluster = Cluster::start(&["wal_level=logical"]);
    assert_eq!(cluster.sql("postgres", "SHOW wal_level"), "logical");
    cluster.sql("postgres", "CREATE DATABASE shop");
    assert!(cluster.try_sql("shop", "SELECT 1/0").unwrap_err().contains("division by zero"));
    cluster.pgbench("shop", &["-i", "-s", "1", "-q"]);
    let outcome = cluster.pgbench("shop", &["-c", "2", "-t", "20"]);
    assert_eq!((outcome.transactions, outcome.failed), (40, 0), "{}", outcome.text);
    cluster.crash();
    assert!(cluster.try_sql("shop", "SELECT 1").is_err());
    cluster.restart(None);
    assert_eq!(cluster.sql("shop", "SELECT count(*) FROM pgbench_history"), "40");
    cluster.stop();
    cluster.restart(Some(&["wal_level=replica"]));
    assert_eq!(cluster.sql("postgres", "SHOW wal_level"), "replica");
}
