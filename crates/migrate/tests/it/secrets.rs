//! All output of proxy and tool at level trace, and all files that they write, through one migration that fails and two
//! that do not: they hold no password, nothing that can replace a password, and no value of a client's.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use stillpoint_migrate_tests::{Testbed, stillpoint};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};

/// Roles of clients, and their passwords.
const CLIENTS: [(&str, &str); 2] = [("alice", "first-hidden-word"), ("bob", "second-hidden-word")];
/// Passwords of the tool's own role, one for each server.
const MOVERS: [&str; 2] = ["third-hidden-word", "fourth-hidden-word"];
/// Part of every value that clients write, set or send.
const VALUE: &str = "hidden-value";

/// A table whose copy takes a while.
const BALLAST: &str = "CREATE TABLE ballast AS SELECT i, repeat(md5(i::text), 10) AS v FROM generate_series(1, 10000) i; \
     ALTER TABLE ballast ADD PRIMARY KEY (i)";

/// All values that can be derived from a password and its verifier, in the forms in which bytes are written.
const FORMS: &str = r#"
import base64, hashlib, hmac, sys
password, stored = sys.argv[1].encode(), sys.argv[2]
kind, salted, keys = stored.split("$")
count, salt = salted.split(":")
key = hashlib.pbkdf2_hmac("sha256", password, base64.b64decode(salt), int(count))
client = hmac.digest(key, b"Client Key", "sha256")
server = hmac.digest(key, b"Server Key", "sha256")
assert keys == ":".join(base64.b64encode(k).decode() for k in (hashlib.sha256(client).digest(), server))
for secret in (password, base64.b64decode(salt), key, client, server, hashlib.sha256(client).digest()):
    print(base64.b64encode(secret).decode().rstrip("="))
    print(secret.hex())
    print(", ".join(map(str, secret)))
print(password.decode())
"#;

fn forms(password: &str, stored: &str) -> Vec<String> {
    let output = Command::new("python3").args(["-c", FORMS, password, stored]).output().expect("run python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect()
}

fn cluster(mover: &str, stored: &[String], settings: &[&str]) -> Cluster {
    let cluster = Cluster::start(settings);
    cluster.sql("postgres", &format!("CREATE ROLE mover SUPERUSER LOGIN PASSWORD '{mover}'"));
    for (at, (role, password)) in CLIENTS.iter().enumerate() {
        let password = stored.get(at).map_or(*password, String::as_str);
        cluster.sql("postgres", &format!("CREATE ROLE {role} LOGIN PASSWORD '{password}'"));
    }
    let hba = "local all all trust\nhost all postgres all trust\nhost all all all scram-sha-256\n";
    std::fs::write(cluster.data_dir().join("pg_hba.conf"), hba).unwrap();
    cluster.sql("postgres", "SELECT pg_reload_conf()");
    cluster
}

/// Stored form of a role's password.
fn stored(cluster: &Cluster, role: &str) -> String {
    cluster.sql("postgres", &format!("SELECT rolpassword FROM pg_authid WHERE rolname = '{role}'"))
}

/// A client's psql at the proxy, which waits for more input.
struct Client(Child);

impl Client {
    fn start(testbed: &Testbed, (role, password): (&str, &str)) -> Client {
        let mut command = testbed.source.client("psql");
        command.env("PGPORT", testbed.port().to_string()).env("PGUSER", role).env("PGPASSWORD", password);
        let command = command.args(["-X", "-q", "-d", "shop"]).env("PGAPPNAME", role);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Client(child.spawn().expect("start psql"))
    }

    fn say(&mut self, sql: &str) {
        writeln!(self.0.stdin.as_mut().expect("piped"), "{sql}").expect("psql listens");
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().expect("psql ends").success());
    }
}

/// The proxy and the tool, with all their output in files of one directory.
struct OutputSearch<'s> {
    testbed: &'s Testbed,
    proxy: Child,
    count: usize,
}

impl OutputSearch<'_> {
    fn start(testbed: &Testbed) -> OutputSearch<'_> {
        std::fs::create_dir(testbed.path("told")).unwrap();
        let mut command = testbed.proxy_command(&[]);
        command.env("STILLPOINT_LOG", "trace");
        let [out, err] = ["out", "err"].map(|name| File::create(testbed.path(&format!("told/proxy.{name}"))).unwrap());
        let proxy = command.stdout(out).stderr(err).spawn().expect("start the proxy");
        let told = OutputSearch { testbed, proxy, count: 0 };
        until("the proxy to serve", || told.text("proxy.out").contains("proxy-started").then_some(()));
        told
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.testbed.path(&format!("told/{name}"))).unwrap_or_default()
    }

    /// Starts a command; one password is in a connection string, the other in the environment.
    fn begin(&mut self, words: &[&str]) -> (Child, usize) {
        self.count += 1;
        let file = |name: &str| File::create(self.testbed.path(&format!("told/{}.{name}", self.count))).unwrap();
        let place = |port: u16| format!("host=127.0.0.1 port={port} user=mover dbname=shop");
        let mut command = Command::new(stillpoint());
        command.env("STILLPOINT_LOG", "trace").env("PGPASSWORD", MOVERS[1]).args(["--json", "migrate"]).args(words);
        let source = format!("{} password={}", place(self.testbed.to_source.port()), MOVERS[0]);
        command.args(["--source", &source, "--target", &place(self.testbed.to_target.port())]);
        command.arg("--proxy").arg(self.testbed.path("proxy.sock")).arg("--state").arg(self.testbed.path("told/state"));
        (command.stdout(file("out")).stderr(file("err")).spawn().expect("start stillpoint"), self.count)
    }

    fn end(&self, (mut child, number): (Child, usize), code: i32) -> String {
        let status = child.wait().expect("a command ends");
        let said = self.text(&format!("{number}.out")) + &self.text(&format!("{number}.err"));
        assert_eq!(status.code(), Some(code), "{said}");
        said
    }

    /// Starts a `run` that is stuck in its copy, with the definitions on the target; `slow_down(0)` lets it go on.
    fn stuck(&mut self) -> (Child, usize) {
        let testbed = self.testbed;
        let run = self.begin(&["run", "--share", "0"]);
        let copies = "\"phase\":\"copy\"";
        until("the copy to begin", || self.text(&format!("{}.out", run.1)).contains(copies).then_some(()));
        testbed.to_target.slow_down(50_000);
        until("the tables to be there", || testbed.target.try_sql("shop", "SELECT FROM kept").ok());
        run
    }

    fn run(&mut self, words: &[&str]) -> String {
        let begun = self.begin(words);
        self.end(begun, 0)
    }

    /// Checks that no other user can read what a migration keeps on disk: definitions hold passwords of foreign
    /// servers.
    fn assert_private(&self) {
        let state = self.testbed.path("told/state");
        let mode = |path: &Path| std::fs::metadata(path).expect("look at a file").permissions().mode() & 0o7777;
        assert_eq!(mode(&state), 0o700);
        let mut names = Vec::new();
        visit_files(&state, &mut |path| {
            assert_eq!(mode(path), 0o600, "{}", path.display());
            names.extend(path.extension().map(|kind| kind.to_string_lossy().into_owned()));
        });
        assert!(names.iter().any(|kind| kind == "dump"), "{names:?}");
    }

    /// Searches all files so far for the secrets.
    fn search(&self, secrets: &[String]) {
        let mut found = Vec::new();
        visit_files(&self.testbed.path("told"), &mut |path| search_file(path, secrets, &mut found));
        search_file(&self.testbed.path("routes.json"), secrets, &mut found);
        assert!(found.is_empty(), "{found:#?}");
    }
}

impl Drop for OutputSearch<'_> {
    fn drop(&mut self) {
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
    }
}

fn visit_files(directory: &Path, each: &mut impl FnMut(&Path)) {
    for entry in std::fs::read_dir(directory).expect("read a directory").flatten() {
        if entry.path().is_dir() { visit_files(&entry.path(), each) } else { each(&entry.path()) }
    }
}

fn search_file(path: &Path, secrets: &[String], found: &mut Vec<String>) {
    let text = String::from_utf8_lossy(&std::fs::read(path).expect("read a file")).to_lowercase();
    for line in text.lines() {
        if let Some(secret) = secrets.iter().find(|secret| line.contains(&secret.to_lowercase())) {
            found.push(format!("{}: {secret}: {line}", path.display()));
        }
    }
}

#[test]
fn no_secret_is_told_or_written_down() {
    if !available() {
        return;
    }
    let settings = ["wal_level=logical"];
    let source = cluster(MOVERS[0], &[], &settings);
    let verifiers = CLIENTS.map(|(role, _)| stored(&source, role));
    let target = cluster(MOVERS[1], &verifiers, &settings);
    let mut secrets = vec![VALUE.to_owned()];
    let movers = [stored(&source, "mover"), stored(&target, "mover")];
    let passwords = CLIENTS.iter().map(|(_, password)| *password).chain(MOVERS);
    passwords
        .zip(verifiers.iter().chain(&movers))
        .for_each(|(password, stored)| secrets.extend(forms(password, stored)));

    let mut testbed = Testbed::of(source, target);
    testbed.source.sql("shop", "CREATE TABLE kept (k text PRIMARY KEY, v text); GRANT ALL ON kept TO PUBLIC");
    testbed.source.sql("shop", &format!("INSERT INTO kept VALUES ('{VALUE}-0', '{VALUE}')"));
    testbed.source.sql("shop", BALLAST);
    // This proxy listens to logins; the proxy of the other test has verifiers.
    testbed.kill_proxy();
    let mut told = OutputSearch::start(&testbed);
    let mut clients = CLIENTS.map(|client| Client::start(&testbed, client));
    for (at, client) in clients.iter_mut().enumerate() {
        client.say(&format!("SET app.token = '{VALUE}'; PREPARE p AS SELECT '{VALUE}', $1::text;"));
        client.say(&format!("EXECUTE p('{VALUE}'); INSERT INTO kept VALUES ('{VALUE}-{at}-there', '{VALUE}');"));
        client.say(&format!("SELECT '{VALUE}'::int; SELECT {VALUE}; LISTEN \"{VALUE}\"; UNLISTEN *;"));
    }
    until("their rows", || (testbed.source.sql("shop", "SELECT count(*) FROM kept") == "3").then_some(()));
    told.run(&["check"]);

    // The target refuses a row that comes after the snapshot.
    let failing = told.stuck();
    told.assert_private();
    let writable = "SET TRANSACTION READ WRITE";
    testbed.target.sql("shop", &format!("{writable}; INSERT INTO kept VALUES ('{VALUE}-twice', '')"));
    clients[0].say(&format!("INSERT INTO kept VALUES ('{VALUE}-twice', '{VALUE}');"));
    until("its row", || (testbed.source.sql("shop", "SELECT count(*) FROM kept") == "4").then_some(()));
    told.run(&["status"]);
    testbed.to_target.slow_down(0);
    let said = told.end(failing, 4);
    assert!(said.contains("duplicate key value") && said.contains("retrying"), "{said}");

    let ran = told.run(&["run", "--share", "0", "--pause-attempts", "20"]);
    assert!(ran.contains("fenced and drained"), "everything is told: {ran}");
    told.search(&secrets);
    clients[0].say(&format!("INSERT INTO kept VALUES ('{VALUE}-back', '{VALUE}');"));
    let back = "SELECT count(*) FROM kept WHERE k LIKE '%-back'";
    until("a row at the target", || (testbed.target.sql("shop", back) == "1").then_some(()));
    testbed.target.sql("shop", "CREATE INDEX added ON kept (v)");
    let refused = told.begin(&["fallback"]);
    assert!(told.end(refused, 3).contains("public.added"));
    told.run(&["status"]);
    told.run(&["fallback", "--drop-definitions", "--pause-attempts", "20"]);
    assert_eq!(testbed.source.sql("shop", back), "1");
    told.run(&["run", "--share", "0", "--pause-attempts", "20"]);
    told.run(&["finish"]);
    clients.into_iter().for_each(Client::end);
    let log = told.text("proxy.err");
    for wanted in ["session begins", "alice", "bob", " verifiers, ", "Switch(shop)"] {
        assert!(log.contains(wanted), "{wanted}: {log}");
    }
    told.search(&secrets);
}

/// The end of a capture is reported with its cause, and without the client's text.
#[test]
fn what_ends_a_capture_is_told_without_what_the_client_said() {
    if !available() {
        return;
    }
    let source = cluster(MOVERS[0], &[], &["wal_level=replica"]);
    let verifiers = CLIENTS.map(|(role, _)| stored(&source, role));
    let target = cluster(MOVERS[1], &verifiers, &["wal_level=logical"]);
    let mut testbed = Testbed::of(source, target);
    testbed.source.sql("shop", BALLAST);
    testbed.source.sql(
        "shop",
        "CREATE TABLE kept (k text PRIMARY KEY, v text); GRANT ALL ON kept TO PUBLIC; \
         CREATE FUNCTION note(text) RETURNS void LANGUAGE sql AS 'INSERT INTO public.kept VALUES ($1)'",
    );
    testbed.kill_proxy();
    let stored: Vec<String> =
        CLIENTS.iter().zip(&verifiers).map(|((role, _), stored)| format!("{role} {stored}\n")).collect();
    std::fs::write(testbed.path("verifiers"), stored.concat()).unwrap();
    let mut config = File::options().append(true).open(testbed.config()).unwrap();
    writeln!(config, "verifiers = {:?}", testbed.path("verifiers")).unwrap();
    let mut told = OutputSearch::start(&testbed);
    let mut client = Client::start(&testbed, CLIENTS[0]);
    for said in [
        format!("SELECT note('{VALUE}')"),
        format!("DO '{VALUE}'"),
        format!("CALL note('{VALUE}')"),
        format!("INSERT INTO kept VALUES ('{VALUE}') BESIDES '{VALUE}'"),
        format!("INSERT INTO kept VALUES ('{VALUE}-1'); UPDATE kept SET k = '{VALUE}-2' WHERE k = '{VALUE}-1'"),
    ] {
        let run = told.stuck();
        client.say(&format!("{said};"));
        until("the capture to end", || {
            let over = told.text("proxy.err").matches("capture ends").count();
            (over >= told.count).then_some(())
        });
        testbed.to_target.slow_down(0);
        let over = told.end(run, 4);
        assert!(over.contains("capture in the proxy ended"), "{said}: {over}");
    }
    let moved = told.run(&["run", "--share", "0"]);
    assert!(moved.contains("switched-over"), "{moved}");
    client.end();
    let passwords = CLIENTS.iter().zip(&verifiers);
    let secrets = passwords.flat_map(|((_, password), stored)| forms(password, stored)).chain([VALUE.to_owned()]);
    told.search(&secrets.collect::<Vec<_>>());
}
