//! The proxy's live page and metrics while an operator's commands move a database there and back.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use stillpoint_migrate_tests::{Testbed, Trial};
use stillpoint_testing::port::free_port;
use stillpoint_testing::postgresql::available;
use stillpoint_testing::wait::until;

const TOKEN: &str = "an operator's token, at least 32 characters";

/// Starts the proxy again, with a page; returns the page's port.
fn with_page(testbed: &mut Testbed) -> u16 {
    let token = testbed.path("page.token");
    std::fs::write(&token, TOKEN.replace(' ', "-")).expect("write the token");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).expect("make it private");
    let port = free_port();
    let text = std::fs::read_to_string(testbed.config()).expect("read the configuration");
    let text = format!("metrics = \"127.0.0.1:{port}\"\npage = {{ token = {token:?} }}\n{text}");
    testbed.kill_proxy();
    std::fs::write(testbed.config(), text).expect("write the configuration");
    testbed.start_proxy();
    port
}

fn send(port: u16, request: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
    stream.write_all(request.as_bytes()).expect("ask");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

/// Waits for an event of the page in which `found` returns something about the only database.
fn event<T>(port: u16, what: &str, found: impl Fn(&Value) -> Option<T>) -> T {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set a limit");
    write!(stream, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("ask");
    let mut lines = BufReader::new(stream).lines();
    until(what, || {
        let line = lines.next().expect("events go on").expect("a line");
        let event: Value = serde_json::from_str(line.strip_prefix("data: ")?).expect("an event is JSON");
        found(&event["tenants"][0])
    })
}

/// The value of a metric of the migration.
fn metric(port: u16, name: &str) -> Option<f64> {
    let text = send(port, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let name = format!("stillpoint_migration_{name}{{tenant=\"shop\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok())
}

#[test]
fn an_operator_watches_a_migration_and_orders_its_switch_on_the_page() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    let port = with_page(&mut testbed);
    let holder = testbed.tool(&["run", "--hold", "--share", "0"]);
    event(port, "a command that holds", |shop| shop["takes_orders"].as_bool()?.then_some(()));
    let phases = event(port, "the target's distance", |shop| {
        shop["progress"]["following"]["lag_ms"].as_u64()?;
        Some(shop["progress"]["phases"].clone())
    });
    let names: Vec<&str> =
        phases.as_array().expect("phases").iter().filter_map(|phase| phase["name"].as_str()).collect();
    for phase in ["check", "snapshot", "copy", "catch-up", "compare"] {
        assert!(names.contains(&phase), "{phase}: {names:?}");
    }
    assert!(metric(port, "compared_rows").is_some_and(|rows| rows > 0.0));
    assert_eq!(metric(port, "holding"), Some(1.0));
    let order = |token: &str| {
        let head = format!("POST /switch HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}");
        send(port, &format!("{head}\r\nContent-Length: 4\r\n\r\nshop"))
    };
    assert!(order("wrong").starts_with("HTTP/1.1 403 "));
    assert!(order(&TOKEN.replace(' ', "-")).starts_with("HTTP/1.1 202 "));
    let ended = holder.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(testbed.standing(), (Some("switched".into()), Some("target".into())));
    let switched = event(port, "the result", |shop| {
        let progress = &shop["progress"];
        (progress["ended"] == "clients are on the target").then(|| progress["switched"].clone())
    });
    let paused = switched["paused_us"].as_u64().expect("a pause") as f64 / 1e6;
    assert_eq!(metric(port, "pause_seconds"), Some(paused));
    assert_eq!((metric(port, "ended"), metric(port, "holding")), (Some(1.0), Some(0.0)));
    assert!(order(&TOKEN.replace(' ', "-")).starts_with("HTTP/1.1 409 "), "no command holds any more");
    testbed.succeed(&["fallback"]);
    event(port, "the way back", |shop| {
        let progress = &shop["progress"];
        (progress["operation"] == "fallback" && progress["ended"] == "clients are on the source").then_some(())
    });
}
