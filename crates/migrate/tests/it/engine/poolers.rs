//! Poolers between a migration and its servers are named. PgBouncer and Pgpool-II are Debian's, fetched once into the
//! cache.

use crate::engine::support::Bench;
use rustix::process::Signal;
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_migrate_engine::{Error, Options, Server, Verdict, check};
use stillpoint_testing::child::{ChildGuard, bound_command, run};
use stillpoint_testing::port::free_port;
use stillpoint_testing::postgresql::available;
use stillpoint_testing::wait::until;
use stillpoint_testing::{recipes, skipped};
use tempfile::TempDir;

/// Packages of the poolers, and the libraries that a minimal system lacks.
const PACKAGES: [&str; 7] =
    ["pgbouncer", "pgpool2", "libpgpool2", "libmemcached11", "libhashkit2", "libc-ares2", "libevent-2.1-7"];

/// Directory with the files of the packages.
fn files() -> Result<PathBuf, String> {
    let entry = recipes::entry("poolers", "debian", &PACKAGES.map(|name| name.as_bytes().to_vec()), |into| {
        run(Command::new("apt-get").arg("download").args(PACKAGES).current_dir(into))?;
        for package in fs::read_dir(into).map_err(|error| error.to_string())?.flatten() {
            run(Command::new("dpkg-deb").arg("-x").arg(package.path()).arg(into.join("root")))?;
        }
        Ok(())
    });
    Ok(entry.map_err(|why| why.to_string())?.join("root"))
}

/// A pooler that runs as the user `postgres`.
struct RunningPooler {
    child: ChildGuard,
    _dir: TempDir,
    port: u16,
}

impl RunningPooler {
    fn start(root: &Path, program: &str, arguments: &[&str], texts: &[(&str, String)], port: u16) -> RunningPooler {
        let dir = TempDir::with_prefix("stillpoint-pooler-").expect("make a directory");
        // The pooler is another user's.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).expect("open the directory");
        for (name, text) in texts {
            fs::write(dir.path().join(name), text.replace("DIR", &dir.path().display().to_string())).expect("write");
        }
        let mut command = bound_command(Path::new("setpriv"));
        command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--"]).arg(root.join(program));
        let libraries = ["usr/lib/x86_64-linux-gnu", "usr/lib"].map(|path| root.join(path).display().to_string());
        command.env("LD_LIBRARY_PATH", libraries.join(":")).args(arguments).current_dir(dir.path());
        let log = fs::File::create(dir.path().join("log")).expect("make a log");
        command.stdout(log.try_clone().expect("share the log")).stderr(log);
        let mut child = ChildGuard::from_child(command.spawn().expect("start a pooler"));
        until("the pooler to listen", || {
            let log = || fs::read_to_string(dir.path().join("log")).unwrap_or_default();
            assert!(child.ended().is_none(), "{program} has ended: {}", log());
            TcpStream::connect(("127.0.0.1", port)).ok()
        });
        RunningPooler { child, _dir: dir, port }
    }

    fn pgbouncer(root: &Path, server: u16, administrators: &str, ignored: &str) -> RunningPooler {
        let port = free_port();
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = DIR/users\n{administrators}\n\
             ignore_startup_parameters = {ignored}\n"
        );
        let users = "\"postgres\" \"\"\n".to_owned();
        RunningPooler::start(root, "usr/sbin/pgbouncer", &["ini"], &[("ini", text), ("users", users)], port)
    }

    fn pgpool(root: &Path, server: u16) -> RunningPooler {
        let (port, console) = (free_port(), free_port());
        let text = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\npcp_port = {console}\nsocket_dir = 'DIR'\n\
             pcp_socket_dir = 'DIR'\nwd_ipc_socket_dir = 'DIR'\nbackend_hostname0 = '127.0.0.1'\nbackend_port0 = {server}\n\
             pid_file_name = 'DIR/pid'\nlogdir = 'DIR'\nnum_init_children = 8\nenable_pool_hba = off\n\
             backend_clustering_mode = 'raw'\n"
        );
        let arguments = ["-n", "-f", "conf", "-F", "pcp"];
        RunningPooler::start(root, "usr/sbin/pgpool", &arguments, &[("conf", text), ("pcp", String::new())], port)
    }

    fn server(&self, side: &str) -> Server {
        let text = format!("host=127.0.0.1 port={} user=postgres dbname=shop", self.port);
        Server::parse(side, &text, None).expect("a connection string")
    }
}

impl Drop for RunningPooler {
    fn drop(&mut self) {
        // Pgpool-II ends its own children then.
        self.child.signal(Signal::INT);
        until("a pooler to end", || self.child.ended());
    }
}

async fn refusals(options: &Options) -> String {
    match check(options).await {
        Err(Error::Refused(why)) => why.join("\n"),
        Ok(report) => report.refusals().join("\n"),
        Err(error) => panic!("{error:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poolers_are_named_on_every_side() {
    if !available() {
        return;
    }
    let root = match files() {
        Ok(root) => root,
        Err(why) => return skipped(&why),
    };
    let bench = Bench::with_shop();
    let options = bench.options("shop");
    let report = check(&options).await.expect("a report");
    assert_eq!(report.refusals(), [""; 0], "there is no pooler");
    let unknown: Vec<_> = report.findings.iter().filter(|finding| finding.kind == "pooler").collect();
    assert!(unknown.len() == 1 && unknown[0].verdict == Verdict::NotLookedAt, "{unknown:?}");

    let (source, target) = (bench.source.port(), bench.target.port());
    let closed = RunningPooler::pgbouncer(&root, source, "", "extra_float_digits");
    let open = RunningPooler::pgbouncer(&root, target, "stats_users = postgres", "extra_float_digits");
    let pgpool = RunningPooler::pgpool(&root, source);
    let through = |source: Option<&RunningPooler>, target: Option<&RunningPooler>| Options {
        source: source.map_or_else(|| options.source.clone(), |pooler| pooler.server("source")),
        target: target.map_or_else(|| options.target.clone(), |pooler| pooler.server("target")),
        ..options.clone()
    };
    // A console that refuses the role tells no version.
    let text = refusals(&through(Some(&closed), Some(&open))).await;
    assert!(text.contains("pooler source: ") && text.contains("is PgBouncer; try: --source"), "{text}");
    assert!(text.contains("pooler target: ") && text.contains("is PgBouncer 1."), "{text}");
    let text = refusals(&through(Some(&pgpool), None)).await;
    assert!(text.contains("pooler source: ") && text.contains("is Pgpool-II 4."), "{text}");
    // Behind the proxy.
    for (pooler, name) in [(&closed, "PgBouncer"), (&pgpool, "Pgpool-II 4.")] {
        bench.fake_proxy.lock().expect("no test thread panicked").serving = ("127.0.0.1".into(), pooler.port);
        let text = refusals(&options).await;
        assert!(text.contains("pooler behind the proxy: ") && text.contains(name), "{name}: {text}");
    }
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM pg_replication_slots"), "0", "nothing was made");
}
