//! The live page: who may see it, who may order a switch, and what clients of the page can do to the proxy.

use crate::proxy::support::{Proxy, runtime, server};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;
use stillpoint_migrate_control::{Client, Progress, Reply, Request, ShortText};
use stillpoint_testing::port::free_port;
use stillpoint_testing::postgresql::{Cluster, available};
use stillpoint_testing::{skipped, wait::until};
use tempfile::TempDir;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A proxy with a page; its server need not exist.
struct Bench {
    proxy: Proxy,
    port: u16,
}

fn start(page: &str, server: &str) -> Bench {
    let dir = TempDir::with_prefix("stillpoint-page-").expect("make a directory");
    let token = dir.path().join("token");
    fs::write(&token, format!("{TOKEN}\n")).expect("write the token");
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).expect("make it private");
    let port = free_port();
    let page = page.replace("TOKEN", &format!("token = {token:?}"));
    let top = format!("metrics = \"127.0.0.1:{port}\"\n{page}\n");
    let proxy = Proxy::start_in(dir, &top, &format!("{server}[tenants.postgres]\nserver = \"a\"\n"));
    Bench { proxy, port }
}

fn without_server(page: &str) -> Bench {
    start(page, &format!("[servers.a]\nhost = \"127.0.0.1\"\nport = {}\n", free_port()))
}

impl Bench {
    fn send(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set a limit");
        stream.write_all(request.as_bytes()).expect("ask");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    }

    fn status(&self, method: &str, path: &str, lines: &str, body: &str) -> String {
        let len = body.len();
        let reply = self.send(&format!("{method} {path} HTTP/1.1\r\n{lines}Content-Length: {len}\r\n\r\n{body}"));
        reply.split(' ').nth(1).unwrap_or_default().to_owned()
    }

    fn order(&self, lines: &str, tenant: &str) -> String {
        self.status("POST", "/switch", &format!("Host: 127.0.0.1:{}\r\n{lines}", self.port), tenant)
    }

    fn events(&self) -> Events {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set a limit");
        write!(stream, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("ask");
        Events(BufReader::new(stream))
    }

    /// Shows progress, and returns true if a switch was ordered.
    fn show(&self, holding: Option<&str>) -> bool {
        let text = ShortText::shorten;
        let (operation, source, target) = (text("migrate"), text("old"), text("<img src=x onerror=alert(1)>"));
        let mut progress = Progress { operation, source, target, holding: holding.map(text), ..Progress::default() };
        progress.phases.begin(text("catch-up"));
        match self.proxy.ask(Request::Progress { tenant: "postgres".into(), progress: Box::new(progress) }) {
            Reply::Shown { switch } => switch,
            other => panic!("{other:?}"),
        }
    }
}

/// Server-sent events.
struct Events(BufReader<TcpStream>);

impl Iterator for Events {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.0.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(serde_json::from_str(data).expect("an event is JSON"));
            }
        }
    }
}

#[test]
fn there_is_no_page_and_no_button_without_configuration() {
    let bench = without_server("");
    for path in ["/", "/events", "/switch"] {
        assert_eq!(bench.status("GET", path, "Host: localhost\r\n", ""), "404", "{path}");
    }
    assert_eq!(bench.order(&format!("Authorization: Bearer {TOKEN}\r\n"), "postgres"), "404");
    let bench = without_server("page = {}");
    assert_eq!(bench.status("GET", "/", "Host: localhost\r\n", ""), "200");
    assert!(!bench.show(Some("no switch is ordered")));
    assert_eq!(bench.order(&format!("Authorization: Bearer {TOKEN}\r\n"), "postgres"), "403");
    assert_eq!(bench.events().next().expect("an event")["button"], false);
    assert!(!bench.show(Some("no switch is ordered")), "there is no button");
}

#[test]
fn a_switch_is_ordered_by_the_token_alone_and_from_the_page_alone() {
    let bench = without_server("page = { TOKEN, hosts = [\"db.example\"] }");
    let right = format!("Authorization: Bearer {TOKEN}\r\n");
    assert_eq!(bench.order(&right, "postgres"), "409", "no command has reported");
    bench.show(None);
    assert_eq!(bench.order(&right, "postgres"), "409", "the command does not hold");
    bench.show(Some("no switch is ordered"));
    for wrong in [
        "",
        "Authorization: Bearer \r\n",
        &format!("Authorization: Bearer {}\r\n", &TOKEN[1..]),
        &format!("Authorization: Bearer {TOKEN}0\r\n"),
        &format!("Authorization: Basic {TOKEN}\r\n"),
        &format!("Cookie: token={TOKEN}\r\n"),
        &format!("{right}Origin: http://evil.example\r\n"),
        &format!("{right}Origin: null\r\n"),
    ] {
        assert_eq!(bench.order(wrong, "postgres"), "403", "{wrong}");
    }
    assert_eq!(bench.order(&right, "other"), "404");
    assert_eq!(bench.status("GET", "/switch", &format!("Host: localhost\r\n{right}"), "postgres"), "405");
    // A name of another site that leads here.
    for host in ["evil.example", "127.0.0.1.evil.example", ""] {
        for (method, path) in [("GET", "/"), ("GET", "/events"), ("POST", "/switch")] {
            assert_eq!(bench.status(method, path, &format!("Host: {host}\r\n{right}"), "postgres"), "403", "{host}");
        }
    }
    assert!(!bench.show(Some("no switch is ordered")), "none of them was an order");
    for origin in [format!("http://127.0.0.1:{}", bench.port), "https://db.example".into()] {
        assert_eq!(bench.order(&format!("{right}Origin: {origin}\r\n"), "postgres"), "202");
        assert!(bench.show(Some("no switch is ordered")), "{origin}");
        assert!(!bench.show(Some("no switch is ordered")), "an order is given once");
    }
}

#[test]
fn texts_of_others_are_texts_in_a_browser() {
    const BROWSER: &str = "chromium-headless-shell";
    if Command::new(BROWSER).arg("--version").output().is_err() {
        return skipped("chromium-headless-shell is not installed");
    }
    let bench = without_server("page = { TOKEN }");
    let profile = TempDir::with_prefix("stillpoint-browser-").expect("make a directory");
    let text = until("the page to show the migration", || {
        bench.show(Some("<b>no</b> switch is ordered"));
        let mut browser = Command::new(BROWSER);
        browser.args(["--no-sandbox", "--disable-gpu", "--dump-dom", "--timeout=3000"]);
        browser.arg(format!("--user-data-dir={}", profile.path().display()));
        let output = browser.arg(format!("http://127.0.0.1:{}/", bench.port)).output().expect("run the browser");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.contains("Migration of postgres").then_some(text)
    });
    assert!(text.contains("to &lt;img src=x onerror=alert(1)&gt;; clients are on"), "{text}");
    assert!(text.contains("Clients stay: &lt;b&gt;no&lt;/b&gt; switch is ordered."), "{text}");
    assert!(!text.contains("<img") && text.contains("catch-up ..."), "{text}");
}

#[test]
fn requests_that_are_not_whole_harm_none_of_the_others() {
    let bench = without_server("page = { TOKEN }");
    let long = "x".repeat(20_000);
    for request in [
        format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n"),
        "POST /switch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n".into(),
        "POST /switch HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".into(),
        "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".into(),
        "nonsense\r\n\r\n".into(),
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", bench.port)).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set a limit");
        // The proxy may have closed before it has read everything.
        let _ = stream.write_all(request.as_bytes());
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        let reply = String::from_utf8_lossy(&reply);
        assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 400 "), "{request:.60}: {reply}");
    }
    // Readers of events that read nothing make way for others.
    let readers: Vec<Events> = (0..40).map(|_| bench.events()).collect();
    assert!(bench.send("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("HTTP/1.1 200 "));
    let mut last = readers.into_iter().next_back().expect("a reader");
    assert!(last.next().is_some() && last.next().is_some());
}

#[test]
fn the_state_of_sessions_and_of_a_migration_is_shown() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE ROLE \"<b>\" LOGIN; GRANT ALL ON SCHEMA public TO \"<b>\"");
    let bench = start("page = { TOKEN }", &server("a", &cluster));
    let reply = bench.send("GET / HTTP/1.1\r\nHost: [::1]:1\r\n\r\n");
    assert!(reply.contains("Content-Security-Policy: default-src 'none'; script-src 'nonce-"), "{reply:.600}");
    let mut events = bench.events();
    let first = events.next().expect("an event");
    assert_eq!((&first["tenants"][0]["name"], &first["tenants"][0]["progress"]), (&"postgres".into(), &Value::Null));
    bench.show(Some("<script>alert(1)</script>\n"));
    runtime().block_on(async {
        let conninfo = format!("host=127.0.0.1 port={} user=<b> dbname=postgres", bench.proxy.port);
        let (client, connection) = tokio_postgres::connect(&conninfo, tokio_postgres::NoTls).await.expect("connect");
        tokio::spawn(connection);
        client.batch_execute("CREATE TEMPORARY TABLE t (a int)").await.expect("a table");
        let mut control = Client::connect(&bench.proxy.control).await.expect("reach the proxy");
        let prepared = control.ask(&crate::proxy::support::preparing("postgres", "a", &[])).await;
        assert!(matches!(&prepared, Ok(Reply::Prepared { pinned, .. }) if pinned.len() == 1), "{prepared:?}");
        let seen = tokio::task::spawn_blocking(move || {
            events.find(|event| event["tenants"][0]["pinned_count"] == 1).expect("an event")
        });
        let event = seen.await.expect("events are read");
        let tenant = &event["tenants"][0];
        assert_eq!(tenant["pinned"][0]["user"], "<b>");
        assert!(tenant["pinned"][0]["why"].as_str().is_some_and(|why| why.contains("temporary")), "{tenant}");
        assert_eq!(tenant["progress"]["holding"], "<script>alert(1)</script> ");
        assert_eq!(tenant["progress"]["phases"][0]["name"], "catch-up");
        assert_eq!((&tenant["takes_orders"], &event["button"]), (&true.into(), &true.into()));
        assert!(tenant["waits"].as_array().is_some_and(|waits| !waits.is_empty()), "{tenant}");
        drop(client);
    });
    // Values that no command of ours sends.
    let refused = |progress: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&bench.proxy.control).expect("reach the proxy");
        writeln!(stream, "{{\"request\":\"progress\",\"tenant\":\"postgres\",\"progress\":{progress}}}").expect("ask");
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).expect("a reply");
        line.contains("\"reply\":\"error\"")
    };
    let with = |more: &str| format!("{{\"operation\":\"migrate\",\"source\":\"a\",\"target\":\"b\"{more}}}");
    assert!(!refused(&with("")));
    for more in [",\"holding\":\"a\\nb\"", ",\"other\":1", ",\"kept_percent\":-1", ",\"phases\":[{\"name\":1}]"] {
        assert!(refused(&with(more)), "{more}");
    }
    assert!(refused(&with(&format!(",\"warning\":\"{}\"", "x".repeat(301)))));
}
