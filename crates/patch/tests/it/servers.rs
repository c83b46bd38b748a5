//! Tests of the helpers themselves: servers start, answer and have ended afterwards.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::{Outcome, Sample};
use stillpoint_patch_tests::effects::EFFECTS;
use stillpoint_patch_tests::load::{Clients, Load};
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_patch_tests::mariadb::{Policy, packaged};
use stillpoint_patch_tests::server::{Memcached, Redis};
use stillpoint_patch_tests::{packages, skip, wait};
use stillpoint_testing::packages::Binary;

fn is_there(pid: i32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}

#[test]
fn redis_of_debian_starts_answers_and_is_gone() {
    let binary = match packages::redis(None) {
        Ok(binary) => binary,
        Err(why) => skip!(why),
    };
    let redis = Redis::start(&binary, &[]);
    let (pid, dir) = (redis.pid(), redis.dir().to_owned());
    assert_eq!(std::fs::read_link(format!("/proc/{pid}/exe")).unwrap().file_name().unwrap(), "redis-check-rdb");
    redis.populate(1000);
    let mut client = redis.client();
    assert_eq!(client.command(&["SET", "a", "b"]).unwrap().text(), "OK");
    assert_eq!(client.command(&["GET", "a"]).unwrap().text(), "b");
    assert!(client.command(&["NO-SUCH-COMMAND"]).unwrap().text().starts_with("ERR unknown command"));
    drop(redis);
    assert!(!is_there(pid), "redis {pid} outlived its handle");
    assert!(!dir.exists(), "{} outlived its handle", dir.display());
}

#[test]
fn memcached_of_debian_starts_answers_and_is_gone() {
    let binary = match packages::memcached(None) {
        Ok(binary) => binary,
        Err(why) => skip!(why),
    };
    let memcached = Memcached::start(&binary, &["-t", "2"]);
    let pid = memcached.pid();
    let mut stream = TcpStream::connect(("127.0.0.1", memcached.port())).unwrap();
    stream.set_read_timeout(Some(wait::WAIT_TIMEOUT)).unwrap();
    stream.write_all(b"set k 0 0 1\r\nv\r\nget k\r\n").unwrap();
    let expected = b"STORED\r\nVALUE k 0 1\r\nv\r\nEND\r\n";
    let mut answer = vec![0; expected.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, expected);
    drop(memcached);
    assert!(!is_there(pid), "memcached {pid} outlived its handle");
}

#[test]
fn an_unknown_version_is_refused_by_name() {
    if let Err(why) = packages::redis(None) {
        skip!(why);
    }
    let why = packages::redis(Some("5:0.0.0-0")).unwrap_err();
    assert!(why.text().contains("5:0.0.0-0"), "{why}");
}

/// Asks a redis for every effect, and compares with the fixes that its package's changelog names; returns how many are not in it.
fn effects_lacking(binary: &Binary) -> usize {
    let root = binary.path.ancestors().nth(3).expect("usr/bin lies below the root");
    let changelog = root.join("usr/share/doc/redis-server/changelog.Debian.gz");
    let changelog = Command::new("zcat").arg(&changelog).output().expect("run zcat");
    assert!(changelog.status.success(), "{changelog:?}");
    let changelog = String::from_utf8_lossy(&changelog.stdout).into_owned();
    let redis = Redis::start(binary, &[]);
    let answers = EFFECTS.iter().map(|effect| {
        let answer = effect.ask(redis.port()).unwrap_or_else(|e| panic!("{effect:?}: {e}"));
        assert_eq!(answer.fixed, changelog.contains(effect.cve), "{effect:?}: {answer:?}");
        answer.fixed
    });
    let lacking = answers.filter(|fixed| !fixed).count();
    assert_eq!(redis.client().command(&["DBSIZE"]).unwrap().integer(), 0, "an effect leaves nothing behind");
    lacking
}

#[test]
fn every_effect_shows_on_debians_newest_redis() {
    let binary = match packages::redis(None) {
        Ok(binary) => binary,
        Err(why) => skip!(why),
    };
    let lacking = effects_lacking(&binary);
    assert!(lacking < EFFECTS.len(), "{lacking}");
}

#[test]
fn debians_older_redis_lacks_the_newest_effect() {
    let versions = match packages::versions("redis-server") {
        Ok(versions) => versions,
        Err(why) => skip!(why),
    };
    let Some(older) = versions.get(1) else {
        let why = packages::too_few("redis-server", &versions);
        skip!(why)
    };
    let binary = match packages::redis(Some(older)) {
        Ok(binary) => binary,
        Err(why) => skip!(why),
    };
    assert!(effects_lacking(&binary) > 0);
}

#[test]
fn load_is_recorded_and_ends_in_order() {
    let binary = match packages::redis(None) {
        Ok(binary) => binary,
        Err(why) => skip!(why),
    };
    let redis = Redis::start(&binary, &[]);
    let clients = Clients { connections: 4, rate: 500, idle: 3, blocking: 2, keys: 1_000, ..Clients::default() };
    Load::fill(redis.port(), &clients);
    let load = Load::start(redis.port(), &clients, redis.dir(), "load");
    let from = now_ns();
    wait::until("half a second of load", || (now_ns() - from > 500_000_000).then_some(()));
    let observed = load.finish();
    let (all, window) = (observed.all(), observed.windows(&[(from, from + 250_000_000)]));
    assert!(window.counts.requests > 0 && window.counts.requests < all.counts.requests, "{window:?}\n{all:?}");
    assert_eq!((all.counts.failed(), observed.dropped(), observed.dead()), (0, 0, 0), "{:?}", observed.result);
}

#[test]
fn redis_keeps_its_data_through_a_restart_and_memcached_does_not() {
    let (redis, memcached) = match (packages::redis(None), packages::memcached(None)) {
        (Ok(redis), Ok(memcached)) => (redis, memcached),
        (Err(why), _) | (_, Err(why)) => skip!(why),
    };
    let (mut redis, mut memcached) = (Redis::start(&redis, &[]), Memcached::start(&memcached, &[]));
    assert_eq!(redis.client().command(&["SET", "a", "b"]).unwrap().text(), "OK");
    let (before, port) = (redis.pid(), redis.port());
    let done = redis.restart();
    assert!(done.began_ns < done.ended_ns && done.ended_ns < done.answered_ns, "{done:?}");
    assert!(!is_there(before) && redis.pid() != before && redis.port() == port);
    assert_eq!(redis.client().command(&["GET", "a"]).unwrap().text(), "b");
    let clients = Clients { protocol: "memcached", keys: 10, ..Clients::default() };
    Load::fill(memcached.port(), &clients);
    let before = memcached.pid();
    memcached.restart();
    assert!(!is_there(before));
    let mut stream = TcpStream::connect(("127.0.0.1", memcached.port())).unwrap();
    stream.write_all(b"stats\r\nquit\r\n").unwrap();
    let mut stats = String::new();
    stream.read_to_string(&mut stats).unwrap();
    assert!(stats.contains("STAT curr_items 0\r\n"), "{stats}");
}

#[test]
fn clients_of_mariadb_go_on_behind_a_restart() {
    let server = match packaged() {
        Ok(server) => server,
        Err(why) => skip!(why),
    };
    let mut mariadb = server.start(Policy::ThreadPerConnection, &[]);
    Work::Ycsb.prepare(&mariadb);
    let plan = Plan { work: Work::Ycsb, connections: 4, rate: Some(200.0), first: 0 };
    let load = Traffic::start_through_restarts(&mariadb, &plan);
    let done = mariadb.restart(None);
    let again = now_ns();
    wait::until("half a second behind the restart", || (now_ns() - again > 500_000_000).then_some(()));
    let samples = load.finish().record.samples;
    let (answered, lost): (Vec<_>, Vec<_>) = samples.iter().partition(|sample| sample.outcome == Outcome::Ok);
    assert_eq!(lost.len(), 4, "{lost:?}");
    for connection in 0..4 {
        let behind = |s: &&&Sample| s.connection == connection && s.ended_ns() > done.ended_ns;
        assert!(answered.iter().filter(behind).count() > 5, "client {connection} did not go on");
    }
    // Requests that were due during the pause count from their due time.
    let waited = answered.iter().map(|sample| sample.latency_ns).max().unwrap_or(0);
    assert!(waited > (done.answered_ns - done.ended_ns) / 2, "{waited} ns of {done:?}");
    assert_eq!(mariadb.asked("SELECT COUNT(*) FROM usertable"), "10000");
}
