//! PostgreSQL's own regression tests print the same through the proxy as without it, byte for byte.
//!
//! Files run one after another, since the output of concurrent files depends on chance; on two clusters that are alike.
//! The short form takes some files, `STILLPOINT_SOAK=1` all.

use crate::proxy::support::{Proxy, server};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_testing::postgresql::{Cluster, Regression, available};

/// Files that depend on the protocol, on session state or on errors; the first makes what the others need.
const SHORT: &[&str] = &[
    "test_setup",
    "boolean",
    "strings",
    "copy",
    "copyselect",
    "copydml",
    "errors",
    "transactions",
    "portals",
    "prepare",
    "prepared_xacts",
    "guc",
    "async",
    "advisory_lock",
    "largeobject",
    "returning",
    "sequence",
    "psql",
    "psql_crosstab",
    "temp",
    "limit",
];

/// No file takes longer on two noisy cores.
const LIMIT: Duration = Duration::from_secs(240);

/// One cluster, and the directory of its results.
struct Side {
    cluster: Cluster,
    dir: PathBuf,
}

impl Side {
    /// A cluster with the database that `pg_regress` would make, and all the files that its server must read beside its
    /// data.
    fn new(regression: &Regression) -> Side {
        let tests = &regression.tests;
        let settings = ["max_prepared_transactions=2", "max_connections=20"];
        let cluster = Cluster::of_programs(&regression.programs, &settings);
        let dir = cluster.socket_dir().join("regress");
        let libraries = dir.join("lib");
        fs::create_dir_all(&libraries).expect("make a directory");
        for part in ["sql", "data", "expected"] {
            let copied = Command::new("cp").arg("-r").arg(tests.join(part)).arg(&dir).status().expect("run cp");
            assert!(copied.success(), "copy {part}");
        }
        let theirs = fs::read_dir(cluster.library_dir()).expect("the server's libraries").flatten();
        for library in theirs.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "so")) {
            let name = library.file_name().expect("a library has a name");
            std::os::unix::fs::symlink(&library, libraries.join(name)).expect("link a library");
        }
        fs::copy(tests.join("regress.so"), libraries.join("regress.so")).expect("copy the tests' library");
        fs::create_dir(dir.join("results")).expect("make a directory");
        let owned = Command::new("chown").arg("-R").arg("postgres:").arg(&dir).status().expect("run chown");
        assert!(owned.success(), "give the directory to the server");
        cluster.sql("postgres", "CREATE DATABASE regression TEMPLATE template0");
        for setting in ["lc_messages", "lc_monetary", "lc_numeric", "lc_time"] {
            cluster.sql("postgres", &format!("ALTER DATABASE regression SET {setting} TO 'C'"));
        }
        cluster.sql("postgres", "ALTER DATABASE regression SET bytea_output TO 'hex'");
        cluster.sql("postgres", "ALTER DATABASE regression SET timezone_abbreviations TO 'Default'");
        Side { cluster, dir }
    }

    /// Starts one file, at this port.
    fn start(&self, name: &str, port: u16) -> std::process::Child {
        let file = |path: String| fs::File::open(self.dir.join(path)).expect("open a test");
        let out = fs::File::create(self.dir.join(format!("results/{name}.out"))).expect("make a file of results");
        let mut psql = self.cluster.client("psql");
        psql.args(["-X", "-a", "-q", "-d", "regression", "-v", "HIDE_TABLEAM=on", "-v", "HIDE_TOAST_COMPRESSION=on"]);
        psql.env("PGPORT", port.to_string()).env("PGTZ", "PST8PDT").env("PGDATESTYLE", "Postgres, MDY");
        psql.env("PG_LIBDIR", self.dir.join("lib")).env("PG_DLSUFFIX", ".so");
        psql.env("PG_ABS_SRCDIR", &self.dir).env("PG_ABS_BUILDDIR", &self.dir).current_dir(&self.dir);
        psql.stdin(file(format!("sql/{name}.sql")))
            .stdout(out.try_clone().expect("share a file"))
            .stderr(Stdio::from(out));
        psql.spawn().expect("start psql")
    }

    /// Output of a file, without the cluster's directory.
    fn result(&self, name: &str) -> String {
        let bytes = fs::read(self.dir.join(format!("results/{name}.out"))).expect("read results");
        let text = String::from_utf8_lossy(&bytes).into_owned();
        text.replace(&self.dir.display().to_string(), "DIR")
    }
}

/// Returns true if this is one of the results that PostgreSQL expects; like PostgreSQL, it ignores spaces.
fn is_expected(tests: &Path, name: &str, result: &str) -> bool {
    let squeezed = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let result = squeezed(result);
    let files = ["", "_1", "_2", "_3", "_4"].map(|suffix| tests.join(format!("expected/{name}{suffix}.out")));
    files.iter().filter_map(|path| fs::read(path).ok()).any(|text| squeezed(&String::from_utf8_lossy(&text)) == result)
}

fn first_difference(direct: &str, proxied: &str) -> String {
    let mut lines = direct.lines().zip(proxied.lines()).enumerate();
    match lines.find(|(_, (a, b))| a != b) {
        Some((number, (a, b))) => format!("line {}: {a:?} directly, {b:?} through the proxy", number + 1),
        None => format!("{} lines directly, {} through the proxy", direct.lines().count(), proxied.lines().count()),
    }
}

#[test]
fn postgresqls_own_tests_print_the_same() {
    if !available() {
        return;
    }
    let fetch = Path::new(env!("CARGO_MANIFEST_DIR")).join("regress/fetch");
    let regression = match Regression::fetch(&fetch) {
        Ok(regression) => regression,
        Err(why) => return stillpoint_testing::skipped(why),
    };
    let tests = &regression.tests;
    let soak = std::env::var_os("STILLPOINT_SOAK").is_some();
    let names = if soak { regression.schedule() } else { SHORT.iter().map(ToString::to_string).collect() };
    let (direct, proxied) = (Side::new(&regression), Side::new(&regression));
    let proxy = Proxy::start("", &format!("{}[tenants.\"*\"]\nserver = \"a\"\n", server("a", &proxied.cluster)));
    let (mut expected, mut different) = (0, Vec::new());
    for name in &names {
        let mut running = [direct.start(name, direct.cluster.port()), proxied.start(name, proxy.port)];
        let begun = Instant::now();
        while running.iter_mut().any(|psql| psql.try_wait().expect("psql is our child").is_none()) {
            assert!(begun.elapsed() < LIMIT, "{name} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let (a, b) = (direct.result(name), proxied.result(name));
        let good = (is_expected(tests, name, &a), is_expected(tests, name, &b));
        expected += usize::from(good.1);
        // Differences that the expected results allow do not count.
        if a != b && good != (true, true) {
            different.push(format!("{name}: {}", first_difference(&a, &b)));
        }
    }
    println!("{} files, {expected} as PostgreSQL expects, {} differ from direct", names.len(), different.len());
    assert!(different.is_empty(), "{}", different.join("\n"));
    // A comparison of files that all fail would show nothing.
    assert!(expected * 10 >= names.len() * 8, "{expected} of {} files print what is expected", names.len());
}
