//! Several databases of a server that change sides together.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use stillpoint_migrate_tests::{Testbed, stillpoint};
use stillpoint_testing::postgresql::{Cluster, Load, available};

const DATABASES: [&str; 2] = ["shop", "stock"];

fn start() -> Testbed {
    let settings = ["wal_level=logical", "max_replication_slots=10"];
    let testbed = Testbed::of_tenants(Cluster::start(&settings), Cluster::start(&settings), &DATABASES);
    for database in DATABASES {
        testbed.source.sql(
            database,
            "CREATE TABLE account (id int PRIMARY KEY, n int); INSERT INTO account SELECT g, 0 FROM generate_series(1, 100) g; \
             CREATE TABLE history (id bigserial PRIMARY KEY)",
        );
    }
    testbed
}

/// Runs `stillpoint migrate` on all databases; returns its exit code and all that it printed.
fn run(testbed: &Testbed, words: &[&str]) -> (Option<i32>, String) {
    let place = |port: u16| format!("host=127.0.0.1 port={port} user=postgres");
    let mut command = Command::new(stillpoint());
    command.arg("migrate").args(words).args(["--databases", &DATABASES.join(",")]);
    command.args(["--source", &place(testbed.source.port()), "--target", &place(testbed.target.port())]);
    command.arg("--proxy").arg(testbed.path("proxy.sock")).arg("--state").arg(testbed.path("state"));
    let output = command.output().unwrap();
    (
        output.status.code(),
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat(),
    )
}

fn load(testbed: &Testbed, database: &str) -> Load {
    let script = testbed.path("writes.sql");
    let writes = "\\set id random(1, 100)\nBEGIN;\nUPDATE account SET n = n + 1 WHERE id = :id;\nINSERT INTO history DEFAULT VALUES;\nCOMMIT;\n";
    std::fs::write(&script, writes).unwrap();
    std::fs::set_permissions(script.parent().unwrap(), Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    testbed.source.pgbench_load(database, testbed.port(), &["-n", "-c", "2", "-T", "600", "-R", "100", "-f", &script])
}

fn has_moved(testbed: &Testbed) -> [bool; 2] {
    DATABASES.map(|database| testbed.target.try_sql(database, "SELECT FROM account").is_ok())
}

#[test]
fn clients_of_several_databases_move_and_return_in_one_pause() {
    if !available() {
        return;
    }
    let testbed = start();
    // The one that cannot move keeps the other where it is, with all checks and copies done.
    let veto = r#"if grep -q '"database":"stock'; then exit 1; fi"#;
    let (code, told) = run(&testbed, &["run", "--share", "0", "--before-switch", veto]);
    assert_eq!(code, Some(4), "{told}");
    assert!(told.contains("before-switch") && told.contains("the migration of stock ended"), "{told}");
    assert_eq!(has_moved(&testbed), [false, false]);
    testbed.assert_clean();
    testbed.target.sql("postgres", "CREATE DATABASE stock");
    let (code, told) = run(&testbed, &["run", "--share", "0"]);
    assert!(code == Some(3) && told.contains("already exists on the target"), "{told}");
    testbed.target.sql("postgres", "DROP DATABASE stock");
    testbed.assert_clean();

    let loads = DATABASES.map(|database| load(&testbed, database));
    let (code, told) = run(&testbed, &["run", "--share", "0", "--pause-timeout", "3s"]);
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(has_moved(&testbed), [true, true]);
    let (code, told) = run(&testbed, &["status"]);
    assert!(code == Some(0) && DATABASES.iter().all(|name| told.contains(&format!("{name}: migration"))), "{told}");
    let (code, told) = run(&testbed, &["fallback", "--pause-timeout", "3s"]);
    assert_eq!(code, Some(0), "{told}");
    for load in loads {
        let outcome = load.stop();
        assert!(outcome.success && outcome.failed == 0 && outcome.transactions > 0, "{}", outcome.text);
    }
    testbed.assert_clean();
    for database in DATABASES {
        let sums = "SELECT (SELECT sum(n) FROM account) = (SELECT count(*) FROM history)";
        assert_eq!(testbed.source.sql(database, sums), "t");
    }
}
