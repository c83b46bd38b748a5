//! Tests: valid configurations, and ones that are refused by name.

use super::*;

const GOOD: &str = r#"
listen = ["127.0.0.1:6432", "/tmp/x/.s.PGSQL.6432"]
control = "/tmp/x/control.sock"
routes = "/tmp/x/routes.json"
[servers.a]
host = "127.0.0.1"
[tenants.shop]
server = "a"
"#;

#[test]
fn a_short_file_is_enough() {
    let config = Config::parse(GOOD).unwrap();
    assert_eq!(config.servers["a"].to_string(), "a (127.0.0.1:5432)");
    assert_eq!(config.socket_mode().unwrap(), 0o600);
    assert_eq!(config.listen[1].to_string(), "/tmp/x/.s.PGSQL.6432");
    assert_eq!(config.warnings(), [""; 0]);
}

#[test]
fn the_installed_example_is_for_the_unit() {
    let config = Config::parse(include_str!("../../../../../packaging/examples/proxy.toml")).unwrap();
    let unit = include_str!("../../../../../packaging/systemd/stillpoint-proxy@.service");
    let (run, state) = (config.control.parent().unwrap(), config.routes.parent().unwrap());
    assert!(unit.lines().any(|line| line == format!("ReadWritePaths={}", run.display())), "{run:?}");
    let state = state.strip_prefix("/var/lib").unwrap();
    assert!(unit.lines().any(|line| line == format!("StateDirectory={}", state.display())), "{state:?}");
    assert_eq!(config.warnings(), [""; 0]);
}

#[test]
fn the_example_of_the_readme_is_for_commands_without_options() {
    let (_, text) = include_str!("../../../../../README.md").split_once("    # proxy.toml").unwrap();
    let config = Config::parse(&format!("#{}", text.split("\n\n").next().unwrap())).unwrap();
    assert_eq!(config.control, Path::new("/run/stillpoint/proxy.sock"), "the default of --proxy");
    assert_eq!(config.server_of("shop").unwrap().host, "10.0.0.1");
    assert!(config.admits("shop", "app", "10.0.0.5".parse().unwrap(), false));
}

#[test]
fn what_is_wrong_is_named() {
    for (from, to, expected) in [
        ("server = \"a\"", "server = \"b\"", "server `b`, which is not in `[servers]`"),
        ("host = \"127.0.0.1\"", "host = \"h\"\ntls = \"verify-full\"", "no `ca`"),
        ("host = \"127.0.0.1\"", "host = \"/run\"\ntls = \"require\"", "does not support TLS"),
        ("host = \"127.0.0.1\"", "host = \"h\"\nhots = 1", "hots"),
        ("[tenants.shop]\nserver = \"a\"", "", "no tenant"),
        ("[\"127.0.0.1:6432\", \"/tmp/x/.s.PGSQL.6432\"]", "[]", "`listen`"),
        ("127.0.0.1:6432", "localhost", "\"localhost\" is neither"),
        ("[servers.a]", "[page]\n[servers.a]", "`page` needs `metrics`"),
        ("[servers.a]", "metrics = \"0.0.0.0:1\"\n[page]\n[servers.a]", "for this machine only"),
        ("[servers.a]", "workers = 0\n[servers.a]", "`workers` is 0"),
        ("[servers.a]", "socket_mode = \"999\"\n[servers.a]", "octal"),
        ("[servers.a]", "limits = { unnamed = 0 }\n[servers.a]", "`limits.unnamed` is 0"),
        ("[servers.a]", "limits = { logins_per_tenant = 0 }\n[servers.a]", "`limits.logins_per_tenant` is 0"),
        ("[servers.a]", "limits = { logins_per_address = 0 }\n[servers.a]", "`limits.logins_per_address` is 0"),
        ("[servers.a]", "limits = { memory_mib = 1 }\n[servers.a]", "not for 1000"),
    ] {
        let text = GOOD.replace(from, to);
        assert_ne!(text, GOOD, "{from}");
        let error = Config::parse(&text).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_surprises_is_said() {
    let text =
        GOOD.replace("host = \"127.0.0.1\"", "host = \"/run/postgresql\"").replace("127.0.0.1:6432", "0.0.0.0:6432");
    let warnings = Config::parse(&text).unwrap().warnings();
    assert!(warnings[0].contains("peer") && warnings[1].contains("without TLS"), "{warnings:?}");
}

#[test]
fn what_differs_is_named_and_how_it_is_written_is_not() {
    let config = Config::parse(GOOD).unwrap();
    let written_otherwise = GOOD.replace("host = \"127.0.0.1\"", "port = 5432\nhost = '127.0.0.1'  # the same");
    assert_eq!(config.differences(&Config::parse(&written_otherwise).unwrap()), [""; 0]);
    let other = "limits = { drain_ms = 1 }\n".to_owned() + &GOOD.replace("routes.json", "others.json");
    let other = Config::parse(&other).unwrap();
    assert_eq!(config.differences(&other), ["routes", "limits"]);
    assert_eq!(config.differences(&other.started_as(&config)), ["limits"]);
}

#[test]
fn a_page_is_shown_under_this_machine_s_names_and_chosen_ones() {
    let text = GOOD.replace("[servers.a]", "metrics = \"0.0.0.0:1\"\n[page]\nhosts = [\"Db.example\"]\n[servers.a]");
    let config = Config::parse(&text).unwrap();
    assert!(config.warnings().iter().any(|warning| warning.contains("live page")), "{:?}", config.warnings());
    let page = config.page.unwrap();
    for host in ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "[::1]", "db.EXAMPLE"] {
        assert!(page.is_host(host), "{host}");
    }
    for host in ["", "example", "localhost.example", "0.0.0.0", "10.0.0.1", "127.0.0.1.example", "[::2]", "db.example."]
    {
        assert!(!page.is_host(host), "{host}");
    }
}
