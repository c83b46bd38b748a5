//! Drivers of other languages through the proxy. They are fetched by pip, once, into `.cache`.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_migrate_testbed::{Cluster, available};
use support::{Proxy, server};

/// A Python that has the drivers, or why there is none.
fn python() -> Result<PathBuf, String> {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../.cache/python-drivers");
    let python = cache.join("bin/python");
    let run = |command: &mut Command| -> Result<(), String> {
        let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {text}")) }
    };
    if run(Command::new(&python).args(["-c", "import psycopg, asyncpg"])).is_err() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&cache))?;
        run(Command::new(&python).args(["-m", "pip", "-q", "install", "psycopg[binary]", "asyncpg"]))?;
    }
    Ok(python)
}

#[test]
fn psycopg_and_asyncpg_work() {
    if !available() {
        return;
    }
    let python = match python() {
        Ok(python) => python,
        Err(why) => {
            assert!(std::env::var_os("REQUIRE_ALL").is_none_or(|value| value != "1"), "{why}");
            return println!("skipped: {why}");
        }
    };
    let cluster = Cluster::start(&[]);
    let proxy = Proxy::start("", &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/drivers");
    let port = proxy.port.to_string();
    for (script, arguments) in
        [("psycopg_smoke.py", vec![proxy.conninfo("postgres")]), ("asyncpg_smoke.py", vec![port, "postgres".into()])]
    {
        let output = Command::new(&python).arg(scripts.join(script)).args(&arguments).output().expect("run python");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {text}");
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
}
