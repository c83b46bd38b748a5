//! Databases whose names mean something else to the programs and files that use them.

use crate::engine::support::{Bench, observer};
use std::net::TcpListener;
use stillpoint_migrate_engine::{Outcome, run};
use stillpoint_testing::postgresql::available;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_leads_to_no_other_server_and_to_a_file_of_its_own() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    // A program of libpq that takes the name for a connection string connects here, with the test's password.
    let other = TcpListener::bind("127.0.0.1:0").expect("listen");
    other.set_nonblocking(true).expect("set a socket");
    let port = other.local_addr().expect("an address").port();
    let name = format!("host=127.0.0.1 port={port} dbname=a'b");
    let there = format!("dbname='{}'", name.replace('\'', "\\'"));
    bench.source.sql("postgres", &format!("CREATE DATABASE \"{name}\""));
    let rows = "INSERT INTO item SELECT i, i FROM generate_series(1, 9) i";
    bench.source.sql(&there, &format!("CREATE TABLE item (id int PRIMARY KEY, of int REFERENCES item); {rows}"));
    bench.fake_proxy.lock().unwrap().serving = ("127.0.0.1".into(), bench.source.port());
    let options = bench.options_as("user=postgres password=secret", Some(&name));
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_eq!(bench.target.sql(&there, "SELECT count(*) FROM item"), "9");
    assert!(other.accept().is_err(), "the name was taken for a connection string");
    let journal = format!("host%3D127%2E0%2E0%2E1%20port%3D{port}%20dbname%3Da%27b.json");
    assert!(bench.state().join(journal).exists());
}
