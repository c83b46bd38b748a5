//! COPY BOTH: programs that follow a server's log do so through the proxy, which reports them as pinned sessions.

use crate::proxy::support;
use crate::proxy::support::{Proxy, ask, preparing, server, session};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use stillpoint_migrate_control::{Reply, Request};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};

/// One of the server's own programs, connected to the proxy.
fn program(cluster: &Cluster, proxy: &Proxy, name: &str, arguments: &[&str]) -> Command {
    let mut command = cluster.client(name);
    command.env("PGPORT", proxy.port.to_string()).args(arguments);
    command
}

#[track_caller]
fn succeeds(mut command: Command) {
    let output = command.output().expect("run a program");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Ends it as Ctrl-C does.
#[track_caller]
fn interrupt(mut child: Child) {
    kill_process(Pid::from_raw(child.id() as i32).expect("a process"), Signal::INT).expect("a signal");
    assert!(child.wait().expect("it ends").success());
}

fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_logical_stream_goes_through_both_ways_and_pins_its_tenant() {
    if !available() {
        return;
    }
    // The server ends a walsender whose client is silent for this time.
    let cluster = Cluster::start(&["wal_level=logical", "wal_sender_timeout=2s"]);
    let tables = format!("{0}{1}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster), server("b", &cluster));
    let proxy = Proxy::start("", &tables);
    let mut writer = session(&proxy);
    let recvlogical = |more: &[&str]| {
        let arguments = [&["-d", "postgres", "--slot", "through"], more].concat();
        program(&cluster, &proxy, "pg_recvlogical", &arguments)
    };
    ask(&mut writer, "CREATE TABLE told (n int PRIMARY KEY, v text)");
    succeeds(recvlogical(&["--create-slot", "-P", "test_decoding"]));
    cluster.sql("postgres", "SELECT pg_create_logical_replication_slot('beside', 'test_decoding')");
    let file = cluster.socket_dir().join("told");
    let path = file.display().to_string();
    let stream = recvlogical(&["--start", "-f", &path, "--no-loop", "--status-interval", "1", "--fsync-interval", "1"])
        .stderr(Stdio::inherit())
        .spawn()
        .expect("start pg_recvlogical");
    let mut number = 0;
    let mut arrives = |rows: usize, width: usize| {
        number += rows;
        let sql = "INSERT INTO told SELECT i, repeat('v', {w}) FROM generate_series({a}, {b}) i";
        let sql = sql.replace("{w}", &width.to_string()).replace("{a}", &(number - rows + 1).to_string());
        assert!(ask(&mut writer, &sql.replace("{b}", &number.to_string())).contains("INSERT 0"));
        until("changes to come", || {
            (lines(&file).iter().filter(|line| line.contains("INSERT:")).count() == number).then_some(())
        });
    };
    arrives(1000, 10);
    arrives(2, 3 << 20);
    let written = cluster.sql("postgres", "SELECT pg_current_wal_lsn()");
    until("the server to hear of it", || {
        let slot = "pg_replication_slots WHERE slot_name = 'through'";
        let heard = cluster.sql("postgres", &format!("SELECT confirmed_flush_lsn >= '{written}' FROM {slot}"));
        (heard == "t").then_some(())
    });
    std::thread::sleep(Duration::from_secs(5));
    arrives(1, 10);

    let why = "it is a replication connection";
    let Reply::Prepared { pinned, .. } = proxy.ask(preparing("postgres", "b", &[])) else { panic!("prepared") };
    assert!(pinned.iter().any(|remark| remark.why == why), "{pinned:?}");
    let Reply::Blocked { sessions } = proxy.ask(Request::Pause { tenant: "postgres".into(), limit_ms: 500 }) else {
        panic!("not blocked")
    };
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    let captured = support::runtime().block_on(async {
        let request = Request::Capture { tenant: "postgres".into(), limit_ms: 500, statements: false };
        proxy.control().await.ask(&request).await
    });
    assert!(captured.is_err(), "{captured:?}");
    proxy.ask(Request::Abandon { tenant: "postgres".into() });
    arrives(1000, 10);

    interrupt(stream);
    let active = "SELECT active FROM pg_replication_slots WHERE slot_name = 'through'";
    until("the stream to end at the server", || (cluster.sql("postgres", active) == "f").then_some(()));
    let beside = cluster.sql("postgres", "SELECT data FROM pg_logical_slot_get_changes('beside', NULL, NULL)");
    let told = lines(&file);
    assert!(beside.lines().eq(told.iter().map(String::as_str)), "{} lines and {}", beside.lines().count(), told.len());
    succeeds(recvlogical(&["--drop-slot"]));
    assert_eq!(cluster.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "1");
}

#[test]
fn a_physical_stream_goes_through_where_every_database_is_served() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let named = Proxy::start("", &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    let all = Proxy::start("", &format!("{}[tenants.\"*\"]\nserver = \"a\"\n", server("a", &cluster)));
    let directory = cluster.socket_dir().join("segments");
    let path = directory.display().to_string();
    let owner = std::fs::metadata(cluster.socket_dir()).expect("the cluster's directory");
    std::fs::create_dir(&directory).expect("make a directory");
    chown(&directory, Some(owner.uid()), Some(owner.gid())).expect("give it to postgres");
    let arguments = ["-D", &path, "--no-loop", "--status-interval", "1"];
    let refused = program(&cluster, &named, "pg_receivewal", &arguments).output().expect("run pg_receivewal");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("database \"replication\" is not served here"), "{said}");

    let stream = program(&cluster, &all, "pg_receivewal", &arguments).spawn().expect("start pg_receivewal");
    until("the stream to begin", || {
        (cluster.sql("postgres", "SELECT count(*) FROM pg_stat_replication") == "1").then_some(())
    });
    let segment = cluster.sql("postgres", "SELECT pg_walfile_name(pg_current_wal_lsn())");
    cluster.sql("postgres", "CREATE TABLE filled AS SELECT i, md5(i::text) FROM generate_series(1, 20000) i");
    cluster.sql("postgres", "SELECT pg_switch_wal()");
    let there = directory.join(&segment);
    until("a whole segment", || there.exists().then_some(()));
    let read = |path: &Path| std::fs::read(path).expect("read a segment");
    assert!(read(&there) == read(&cluster.data_dir().join("pg_wal").join(&segment)), "{segment} differs");
    interrupt(stream);
}
