//! Servers as hosting providers have them: no superuser, passwords that no role may read and that differ on both sides, and one for
//! ourselves that a command prints.

use crate::engine::PROVIDER_ROLES;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use stillpoint_migrate_tests::{Testbed, stillpoint};
use stillpoint_testing::postgresql::{Cluster, available};
use stillpoint_testing::wait::until;

const PASSWORD: &str = "of the app";

/// A server whose roles log in by SCRAM; the same password is stored in another form on each server.
fn cluster(mover: &str) -> Cluster {
    let cluster = Cluster::start(&["wal_level=logical"]);
    cluster.sql("postgres", PROVIDER_ROLES);
    cluster.sql("postgres", &format!("ALTER ROLE mover PASSWORD '{mover}'; ALTER ROLE app PASSWORD '{PASSWORD}'"));
    let hba = "local all all trust\nhost all postgres all trust\nhost all all all scram-sha-256\nhost replication all all scram-sha-256\n";
    std::fs::write(cluster.data_dir().join("pg_hba.conf"), hba).unwrap();
    cluster.sql("postgres", "SELECT pg_reload_conf()");
    cluster
}

fn begin_client(testbed: &Testbed) -> Child {
    let mut psql = testbed.source.client("psql");
    psql.env("PGPORT", testbed.port().to_string()).env("PGUSER", "app").env("PGPASSWORD", PASSWORD);
    psql.args(["-X", "-q", "-d", "shop", "-v", "ON_ERROR_STOP=1"]).stdin(Stdio::piped()).spawn().unwrap()
}

fn say(client: &mut Child, sql: &str) {
    writeln!(client.stdin.as_mut().unwrap(), "{sql}").unwrap();
}

struct Commands<'t> {
    testbed: &'t Testbed,
    password: std::path::PathBuf,
}

impl Commands<'_> {
    /// Runs a command with `words`; returns its exit code and all that it printed.
    fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        let place = |port: u16| format!("host=127.0.0.1 port={port} user=mover dbname=shop");
        let mut command = Command::new(stillpoint());
        command.env_remove("PGPASSWORD").args(["migrate"]).args(words);
        command.args(["--source", &place(self.testbed.source.port()), "--target", &place(self.testbed.target.port())]);
        command.arg("--source-password-command").arg(format!("cat {}", self.password.display()));
        command.args(["--target-password-command", "echo 'there too'"]);
        command.arg("--proxy").arg(self.testbed.path("proxy.sock")).arg("--state").arg(self.testbed.path("state"));
        let output = command.output().unwrap();
        let told = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        (output.status.code(), told)
    }
}

#[test]
fn sessions_of_hosted_servers_move_with_passwords_from_a_file() {
    if !available() {
        return;
    }
    let (source, target) = (cluster("here"), cluster("there too"));
    let testbed = Testbed::direct(source, target);
    testbed.source.sql("postgres", "ALTER DATABASE shop OWNER TO app");
    testbed.source.sql("shop", "SET ROLE app; CREATE TABLE kept (line text PRIMARY KEY)");
    let commands = Commands { testbed: &testbed, password: testbed.path("ours") };
    std::fs::write(&commands.password, "here\n").unwrap();

    let mut client = begin_client(&testbed);
    say(&mut client, "SET app.own = 'kept'; PREPARE add AS INSERT INTO kept VALUES ($1); EXECUTE add('source');");
    let lines = "SELECT string_agg(line, ' ' ORDER BY line) FROM kept";
    until("its row", || (testbed.source.sql("shop", lines) == "source").then_some(()));

    let (code, told) = commands.run(&["check"]);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("--client-passwords"), "{told}");
    let file = testbed.path("passwords");
    std::fs::write(&file, format!("app {PASSWORD}\n")).unwrap();
    let mode = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let words = |name| [name, "--client-passwords", file.to_str().unwrap()];
    let (code, told) = commands.run(&words("run"));
    assert!(code == Some(3) && told.contains("chmod 0600"), "{told}");
    mode(0o600);
    let (code, told) = commands.run(&words("run"));
    assert_eq!(code, Some(0), "{told}");
    assert!(!told.contains(PASSWORD), "{told}");
    say(&mut client, "EXECUTE add('target ' || current_setting('app.own'));");
    until("its row", || (testbed.target.sql("shop", lines) == "source target kept").then_some(()));
    let (code, told) = commands.run(&words("fallback"));
    assert_eq!(code, Some(0), "{told}");
    say(&mut client, "EXECUTE add('way back');");
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
    assert_eq!(testbed.source.sql("shop", lines), "source target kept way back");

    // A command that fails is told, and what it prints is not.
    std::fs::remove_file(&commands.password).unwrap();
    let (code, told) = commands.run(&["check"]);
    assert!(code == Some(3) && told.contains("password command for source"), "{told}");
}
