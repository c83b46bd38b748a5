//! Servers and clients of ten kinds that use one `libcrypto`, each on a port and in a directory of its own; none is a service of the system.

use super::crypto_patch::CryptoPatch;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_patch_tests::server::{ChildGuard, bound_command};
use stillpoint_patch_tests::wait;
use stillpoint_testing::packages::{self, Binary};
use stillpoint_testing::port::free_port;
use tempfile::TempDir;

/// User of the database's server, which refuses to run as root: the one without rights.
const SERVER_USER: &str = "65534";
/// A program that computes digests.
const DIGESTS: &str =
    "import hashlib, time\nwhile True:\n    hashlib.new('sha256', b'x' * 4096).digest()\n    time.sleep(0.3)\n";

/// A client, and the lines of it that are answers.
pub(super) struct Client {
    pub(super) command: Command,
    pub(super) is_answer: fn(&str) -> bool,
}

/// Running programs.
pub(super) struct Machine {
    programs: Programs,
    servers: Vec<ChildGuard>,
    https: Vec<u16>,
    redis: Vec<u16>,
    echo: Vec<u16>,
    ssh: u16,
    postgres: u16,
    scale: usize,
    dir: TempDir,
}

/// Debian's programs.
struct Programs {
    nginx: Binary,
    sshd: Binary,
    ssh: Binary,
    redis: Binary,
    redis_cli: Binary,
    haproxy: Binary,
    stunnel: Binary,
    socat: Binary,
    unbound: Binary,
    curl: Binary,
    openssl: Binary,
    /// Directories of the patched library and of those that are not installed.
    libraries: Vec<PathBuf>,
}

impl Programs {
    fn unpack(patch: &CryptoPatch) -> Result<Programs, String> {
        let of = |package: &[&str], path: &str| {
            packages::binary(package, None, path).map_err(|error| format!("{}: {error}", package[0]))
        };
        let redis = ["redis-server", "redis-tools"];
        let mut programs = Programs {
            nginx: of(&["nginx"], "usr/sbin/nginx")?,
            sshd: of(&["openssh-server"], "usr/sbin/sshd")?,
            ssh: of(&["openssh-client"], "usr/bin/ssh")?,
            redis: of(&redis, "usr/bin/redis-server")?,
            redis_cli: of(&redis, "usr/bin/redis-cli")?,
            haproxy: of(&["haproxy"], "usr/sbin/haproxy")?,
            stunnel: of(&["stunnel4"], "usr/bin/stunnel4")?,
            socat: of(&["socat"], "usr/bin/socat")?,
            unbound: of(&["unbound"], "usr/sbin/unbound")?,
            curl: of(&["curl"], "usr/bin/curl")?,
            openssl: of(&["openssl"], "usr/bin/openssl")?,
            libraries: patch.libraries.clone(),
        };
        let all =
            [&programs.nginx, &programs.sshd, &programs.ssh, &programs.redis, &programs.haproxy, &programs.stunnel];
        let more = [&programs.socat, &programs.unbound, &programs.curl, &programs.openssl];
        let directories: Vec<PathBuf> = all.iter().chain(&more).flat_map(|binary| binary.libraries.clone()).collect();
        programs.libraries.extend(directories);
        Ok(programs)
    }

    /// Makes a command that uses the patched library.
    fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = bound_command(program.as_ref());
        command.env("LD_LIBRARY_PATH", self.library_path()).stdin(Stdio::null());
        command
    }

    fn library_path(&self) -> OsString {
        std::env::join_paths(&self.libraries).expect("paths of the cache contain no colon")
    }
}

impl Machine {
    /// Starts servers for about this number of processes, clients included.
    ///
    /// # Errors
    /// A package is not available, or this user is not root.
    pub(super) fn start(patch: &CryptoPatch, processes: usize) -> Result<Machine, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("servers of other users need root".to_owned());
        }
        let programs = Programs::unpack(patch)?;
        let dir = TempDir::with_prefix("stillpoint-machine-").map_err(|e| format!("make a directory: {e}"))?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).map_err(|e| e.to_string())?;
        let mut machine = Machine {
            programs,
            servers: Vec::new(),
            https: Vec::new(),
            redis: Vec::new(),
            echo: Vec::new(),
            ssh: free_port(),
            postgres: free_port(),
            // processes of one step: see the counts below
            scale: (processes / 29).max(1),
            dir,
        };
        machine.certificate();
        machine.start_web();
        machine.start_others();
        machine.start_postgres();
        machine.start_sshd();
        for port in
            machine.https.iter().chain(&machine.redis).chain(&machine.echo).chain([&machine.ssh, &machine.postgres])
        {
            wait::until(&format!("port {port} to be served"), || {
                std::net::TcpStream::connect(("127.0.0.1", *port)).ok()
            });
        }
        Ok(machine)
    }

    /// Starts a program whose output goes to the machine's log, unless the command says otherwise.
    pub(super) fn spawn(&self, mut command: Command) -> ChildGuard {
        let log = fs::File::options().create(true).append(true).open(self.path("log")).expect("open the log");
        command.stderr(log);
        ChildGuard::from_child(command.spawn().unwrap_or_else(|e| panic!("start {command:?}: {e}")))
    }

    pub(super) fn assert_running(&mut self) {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        for server in &mut self.servers {
            assert!(server.ended().is_none(), "a server has ended\n{log}");
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap_or_else(|e| panic!("write {name}: {e}"));
        path
    }

    fn serve(&mut self, mut command: Command) {
        command.stdout(Stdio::null());
        let server = self.spawn(command);
        self.servers.push(server);
    }

    fn certificate(&self) {
        let (key, certificate) = (self.path("key.pem"), self.path("cert.pem"));
        let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost";
        let mut command = self.programs.command(&self.programs.openssl.path);
        command.args(words.split(' ')).arg("-keyout").arg(&key).arg("-out").arg(&certificate).stderr(Stdio::null());
        assert!(command.status().expect("run openssl").success());
        let read = |path: &Path| fs::read_to_string(path).expect("read a certificate");
        self.write("both.pem", &(read(&key) + &read(&certificate)));
    }

    /// Starts nginx, and stunnel in front of it: processes `4 * scale`.
    fn start_web(&mut self) {
        let (both, key, certificate) = (self.path("both.pem"), self.path("key.pem"), self.path("cert.pem"));
        let (both, key, certificate) = (both.display(), key.display(), certificate.display());
        let (tls, plain, place) = (free_port(), free_port(), self.path("nginx"));
        fs::create_dir(&place).expect("make a directory");
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {}/{kind};", place.display()))
            .concat();
        let configuration = format!(
            "worker_processes {}; pid {place}/pid; daemon off; user root; error_log {place}/errors;\n\
             events {{ worker_connections 256; }}\nhttp {{ access_log off; {temporary}\n\
             server {{ listen 127.0.0.1:{tls} ssl reuseport; ssl_certificate {certificate}; ssl_certificate_key {key}; \
             location / {{ return 200 ok; }} }}\n\
             server {{ listen 127.0.0.1:{plain}; location / {{ return 200 ok; }} }} }}\n",
            3 * self.scale,
            place = place.display()
        );
        let file = self.write("nginx.conf", &configuration);
        let mut command = self.programs.command(&self.programs.nginx.path);
        command.arg("-c").arg(file).arg("-e").arg(place.join("errors"));
        self.serve(command);
        self.https.push(tls);
        for number in 0..self.scale {
            let port = free_port();
            let text = format!(
                "foreground = yes\npid =\ncert = {both}\n[tls]\naccept = 127.0.0.1:{port}\nconnect = 127.0.0.1:{plain}\n"
            );
            let file = self.write(&format!("stunnel-{number}.conf"), &text);
            let mut command = self.programs.command(&self.programs.stunnel.path);
            command.arg(file);
            self.serve(command);
            self.https.push(port);
        }
    }

    /// Starts haproxy, `openssl s_server`, socat, redis, unbound and programs in Python: processes `9 * scale`.
    fn start_others(&mut self) {
        let (both, key, certificate) = (self.path("both.pem"), self.path("key.pem"), self.path("cert.pem"));
        let digests = self.write("digests.py", DIGESTS);
        for number in 0..self.scale {
            let [proxy, plain, echo, store, names] = [(); 5].map(|()| free_port());
            let text = format!(
                "global\n  nbthread 1\ndefaults\n  mode http\n  timeout client 60s\n  timeout server 60s\n  timeout connect \
                 5s\nfrontend web\n  bind 127.0.0.1:{proxy} ssl crt {}\n  http-request return status 200\n",
                both.display()
            );
            let file = self.write(&format!("haproxy-{number}.cfg"), &text);
            let mut haproxy = self.programs.command(&self.programs.haproxy.path);
            haproxy.args(["-W", "-db", "-f"]).arg(file);
            let mut server = self.programs.command(&self.programs.openssl.path);
            server.args(["s_server", "-accept", &format!("127.0.0.1:{plain}"), "-www", "-quiet"]);
            server.arg("-cert").arg(&certificate).arg("-key").arg(&key);
            let mut socat = self.programs.command(&self.programs.socat.path);
            let options = format!("bind=127.0.0.1,fork,reuseaddr,cert={},verify=0", both.display());
            socat.arg(format!("OPENSSL-LISTEN:{echo},{options}")).arg("EXEC:cat");
            let mut redis = self.programs.command(&self.programs.redis.path);
            redis.args(["--port", "0", "--bind", "127.0.0.1", "--save", "", "--tls-auth-clients", "no"]);
            redis.args(["--tls-port", &store.to_string(), "--dir"]).arg(self.dir.path());
            redis.arg("--tls-cert-file").arg(&certificate).arg("--tls-key-file").arg(&key);
            redis.arg("--tls-ca-cert-file").arg(&certificate);
            let text = format!(
                "server:\n  interface: 127.0.0.1\n  port: {names}\n  chroot: \"\"\n  username: \"\"\n  directory: \"{0}\"\n  \
                 pidfile: \"{0}/unbound-{number}.pid\"\n  use-syslog: no\n  num-threads: 2\nremote-control:\n  \
                 control-enable: no\n",
                self.dir.path().display()
            );
            let file = self.write(&format!("unbound-{number}.conf"), &text);
            let mut unbound = self.programs.command(&self.programs.unbound.path);
            unbound.args(["-d", "-c"]).arg(file);
            let python = || {
                let mut python = self.programs.command("/usr/bin/python3");
                python.arg(&digests);
                python
            };
            let commands = [haproxy, server, socat, redis, unbound, python(), python(), python()];
            commands.into_iter().for_each(|command| self.serve(command));
            self.https.extend([proxy, plain]);
            self.redis.push(store);
            self.echo.push(echo);
        }
    }

    /// Starts PostgreSQL with TLS: processes by its connections, `3 * scale`.
    fn start_postgres(&mut self) {
        let data = self.path("postgres");
        fs::create_dir(&data).expect("make a directory");
        let owner = |path: &Path| {
            let status = Command::new("chown").arg(SERVER_USER).arg(path).status();
            assert!(status.expect("run chown").success(), "{}", path.display());
        };
        owner(&data);
        let as_user = |program: &Path| {
            let mut command = self.programs.command("setpriv");
            command.args([
                "--reuid",
                SERVER_USER,
                "--regid",
                SERVER_USER,
                "--clear-groups",
                "--pdeathsig",
                "KILL",
                "--",
            ]);
            command.arg(program).current_dir(&data);
            command
        };
        let cluster = data.join("cluster");
        let mut init = as_user(&postgres_tool("initdb"));
        init.arg("-D").arg(&cluster).args(["-A", "trust", "-U", "postgres"]).stdout(Stdio::null());
        assert!(init.status().expect("run initdb").success());
        for name in ["key.pem", "cert.pem"] {
            let copy = cluster.join(name);
            fs::copy(self.path(name), &copy).expect("copy a certificate");
            fs::set_permissions(&copy, fs::Permissions::from_mode(0o600)).expect("chmod");
            owner(&copy);
        }
        let mut server = as_user(&postgres_tool("postgres"));
        server.arg("-D").arg(&cluster).arg("-k").arg(&data).args(["-p", &self.postgres.to_string()]);
        for setting in ["ssl=on", "ssl_cert_file=cert.pem", "ssl_key_file=key.pem", "listen_addresses=127.0.0.1"] {
            server.args(["-c", setting]);
        }
        self.serve(server);
    }

    /// Starts sshd. Its unprivileged user need not exist on this machine: it gets a file of users of its own.
    fn start_sshd(&mut self) {
        for name in ["host", "id"] {
            let mut keygen = self.programs.command(self.programs.ssh.path.with_file_name("ssh-keygen"));
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(self.path(name));
            assert!(keygen.status().expect("run ssh-keygen").success());
        }
        let users = fs::read_to_string("/etc/passwd").expect("read the users");
        let users = self.write("passwd", &(users + "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"));
        let text = format!(
            "Port {}\nListenAddress 127.0.0.1\nHostKey {dir}/host\nAuthorizedKeysFile {dir}/id.pub\nPidFile none\nUsePAM \
             no\nStrictModes no\nPermitRootLogin yes\nMaxStartups 200\n",
            self.ssh,
            dir = self.dir.path().display()
        );
        let configuration = self.write("sshd.conf", &text);
        let script =
            "mount -t tmpfs tmpfs /run && mkdir /run/sshd && mount --bind \"$1\" /etc/passwd && shift && exec \"$@\"";
        let mut command = self.programs.command("unshare");
        command.args(["--mount", "--", "sh", "-ec", script, "sh"]).arg(users);
        command.arg(&self.programs.sshd.path).args(["-D", "-e", "-f"]).arg(configuration);
        self.serve(command);
    }

    /// Returns the clients: processes `10 * scale`, and the connections that they make.
    pub(super) fn clients(&self) -> Vec<Client> {
        let is_web = |line: &str| line == "200 0";
        let mut clients = Vec::new();
        let web = self.https.iter().cycle().take(4 * self.scale);
        for (number, port) in web.enumerate() {
            // curl keeps lines for a pipe until there are hundreds of them, but none for its standard error
            let mut curl = self.programs.command("sh");
            curl.args(["-c", "exec \"$0\" \"$@\" 2>&1"]).arg(&self.programs.curl.path);
            curl.args(["-sk", "--rate", "300/m", "-o", "/dev/null", "-w", "%{stderr}%{http_code} %{exitcode}\\n"]);
            if number % 2 == 0 {
                curl.args(["-H", "Connection: close"]);
            }
            curl.arg(format!("https://127.0.0.1:{port}/[1-1000000]"));
            clients.push(Client { command: curl, is_answer: is_web });
        }
        for (store, echo) in self.redis.iter().zip(&self.echo) {
            let mut redis = self.programs.command(&self.programs.redis_cli.path);
            redis.args(["--tls", "--insecure", "-p", &store.to_string(), "-r", "1000000", "-i", "0.2", "PING"]);
            clients.push(Client { command: redis, is_answer: |line| line == "PONG" });
            let mut socat = self.programs.command("sh");
            let script = "while echo tick; do sleep 0.2; done | \"$0\" - \"$1\"";
            socat.args(["-c", script]).arg(&self.programs.socat.path);
            socat.arg(format!("OPENSSL:127.0.0.1:{echo},verify=0"));
            clients.push(Client { command: socat, is_answer: |line| line == "tick" });
            let mut ssh = self.programs.command(&self.programs.ssh.path);
            ssh.args(["-F", "/dev/null", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]);
            ssh.args(["-o", "LogLevel=ERROR", "-p", &self.ssh.to_string(), "-i"]).arg(self.path("id"));
            ssh.args(["root@127.0.0.1", "while echo tick; do sleep 0.2; done"]);
            clients.push(Client { command: ssh, is_answer: |line| line == "tick" });
        }
        for _ in 0..3 * self.scale {
            let mut psql = self.programs.command("sh");
            let script = "while echo \"select 'tick';\"; do sleep 0.2; done | \"$0\" \"$@\"";
            psql.args(["-c", script]).arg(postgres_tool("psql")).env("PGSSLMODE", "require");
            psql.args([
                "-h",
                "127.0.0.1",
                "-p",
                &self.postgres.to_string(),
                "-U",
                "postgres",
                "-d",
                "postgres",
                "-qAt",
            ]);
            clients.push(Client { command: psql, is_answer: |line| line == "tick" });
        }
        clients
    }
}

/// Returns a program of the newest PostgreSQL that is installed.
fn postgres_tool(name: &str) -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|entry| entry.path());
    let newest = versions.max().unwrap_or_else(|| PathBuf::from("/usr/lib/postgresql"));
    newest.join("bin").join(name)
}

impl Drop for Machine {
    fn drop(&mut self) {
        // the servers' own processes end with them; all at once, so that it takes no minute
        self.servers.iter_mut().for_each(|server| server.signal(rustix::process::Signal::TERM));
        let _ = wait::within(Duration::from_secs(10), || {
            self.servers.iter_mut().all(|server| server.ended().is_some()).then_some(())
        });
    }
}
