//! Debian's smbd, which has a process for each client, and changes of ours to it.

use super::{Change, Daemon, DaemonLoad, Package, with_children};
use crate::Unavailable;
use crate::packages::Binary;
use crate::server::{ChildGuard, Server, bound_command, soon};
use crate::wait;
use rustix::process::Signal;
use std::cell::RefCell;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use tempfile::TempDir;

/// Path of the executable below the root.
pub const PROGRAM: &str = "usr/sbin/smbd";

macro_rules! private {
    ($name:literal) => {
        concat!("usr/lib/x86_64-linux-gnu/samba/lib", $name, "-samba4.so.0")
    };
}

/// Library with nearly all code of the server.
pub const LIBRARY: &str = private!("smbd-base");
const SETTINGS: &str = "usr/lib/x86_64-linux-gnu/libsmbconf.so.0";
const CLIENT: &str = "usr/lib/x86_64-linux-gnu/libsmbclient.so.0";

/// Quiescence points: their directory in `crates/patch/integrations`, and the files that are built with them.
pub const INTEGRATION: (&str, [&str; 4]) = ("samba", [PROGRAM, LIBRARY, SETTINGS, private!("messages-dgm")]);

/// Sessions that work with files, and requests of each in a second.
const SESSIONS: usize = 8;
const SESSION_RATE: u32 = 20;
/// Clients that connect, make one request and leave.
const VISITORS: usize = 1;

/// Returns the packages; once for each process.
///
/// # Errors
/// The packages or their source cannot be fetched.
pub fn package() -> &'static Result<Package, Unavailable> {
    static PACKAGE: OnceLock<Result<Package, Unavailable>> = OnceLock::new();
    PACKAGE.get_or_init(|| {
        let mut package = Package::fetch("samba", &["samba", "smbclient", "libsmbclient"])?;
        package.libraries.push(package.root.join("usr/lib/x86_64-linux-gnu/samba"));
        Ok(package)
    })
}

/// An smbd with all its processes, and a session that was there before any patch.
#[derive(Debug)]
pub struct Samba {
    server: Server,
    package: Package,
    copy: TempDir,
    session: RefCell<Session>,
}

impl Samba {
    /// Starts Debian's program, or another build of it, as a copy: `--exe` means all processes of an executable.
    pub fn start(package: &Package, program: &Binary) -> Samba {
        let copy = TempDir::with_prefix("stillpoint-samba-").expect("make a directory for the program");
        let path = copy.path().join("smbd");
        std::fs::copy(&program.path, &path).expect("copy the program");
        // at its end its first process sends a signal to all of its process group
        let session = Binary { path: "/usr/bin/setsid".into(), libraries: program.libraries.clone() };
        let server = Server::start(&session, |port, dir| {
            content(dir);
            let words = ["--foreground", "--no-process-group", "--debug-stdout", "--configfile"].map(OsString::from);
            let port = format!("--port={port}").into();
            std::iter::once(path.into()).chain(words).chain([configuration(dir).into(), port]).collect()
        });
        let session = Session::start(client(package, server.port(), server.dir()));
        Samba { server, package: package.clone(), copy, session: RefCell::new(session) }
    }

    /// Starts a load: sessions that work with files, and clients that come and go.
    pub fn load(&self) -> Sessions {
        Sessions::start(&self.package, self.server.port(), self.server.dir())
    }
}

impl Daemon for Samba {
    fn selection(&self) -> [OsString; 2] {
        ["--exe".into(), self.copy.path().join("smbd").into()]
    }

    fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    fn processes(&self) -> Vec<i32> {
        with_children(self.server.pid())
    }

    /// Asks in the old session and in a new one: processes that were there before a patch, and one that is made with it.
    fn show(&self, change: &Change) -> String {
        let old = self.session.borrow_mut().ask(change.ask);
        let mut client = client(&self.package, self.server.port(), self.server.dir());
        let output = client.args(["-c", change.ask]).output().expect("run smbclient");
        let new = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        match (change.is_in(&old), change.is_in(&new)) {
            (Ok(here), Ok(there)) if here != there => format!("the processes differ: {old:?} and {new:?}"),
            _ => old + &new,
        }
    }

    fn assert_unharmed(&mut self) {
        self.server.assert_running();
        let log = self.server.log_text();
        for sign in ["INTERNAL ERROR", "PANIC", "smb_panic", "restarted", "killed by signal"] {
            assert!(!log.contains(sign), "the log tells of {sign:?}:\n{log}");
        }
    }
}

impl Drop for Samba {
    fn drop(&mut self) {
        // The first process ends its children.
        self.server.process().signal(Signal::TERM);
        soon("smbd to end", || self.server.process().ended());
    }
}

impl std::ops::Deref for Samba {
    type Target = Server;
    fn deref(&self) -> &Server {
        &self.server
    }
}

fn configuration(dir: &Path) -> PathBuf {
    dir.join(".smb/smb.conf")
}

/// Makes the files of the share, and the configuration where the library of clients expects it.
fn content(dir: &Path) {
    let share = dir.join("share");
    for made in [&dir.join(".smb"), &dir.join("state"), &share, &share.join("dir"), &share.join("load")] {
        std::fs::create_dir_all(made).expect("make a directory of the server");
    }
    for name in ["word.txt", "a long name.text", "held.txt", "locked.txt", "dir/entry"] {
        std::fs::write(share.join(name), "hello world\n").expect("write a file of the share");
    }
    let state: String =
        ["lock directory", "state directory", "cache directory", "pid directory", "private dir", "ncalrpc dir"]
            .iter()
            .map(|name| format!("{name} = {}/state\n", dir.display()))
            .collect();
    let text = format!(
        "[global]\n{state}server role = standalone server\nnetbios name = STILLPOINT\ninterfaces = lo\n\
         bind interfaces only = yes\ndisable netbios = yes\nrpc start on demand helpers = no\n\
         map to guest = Bad User\nguest account = root\nload printers = no\nprinting = bsd\n\
         printcap name = /dev/null\ndisable spoolss = yes\nlog level = 1\nmax log size = 0\n\
         [share]\npath = {}\nguest ok = yes\nguest only = yes\nread only = no\n",
        share.display()
    );
    std::fs::write(configuration(dir), text).expect("write smb.conf");
}

/// Makes a call of Debian's client; it reads no line ahead, and writes each one at once.
fn client(package: &Package, port: u16, dir: &Path) -> Command {
    let mut command = bound_command(Path::new("/usr/bin/stdbuf"));
    command
        .args(["-i0", "-oL"])
        .arg(package.root.join("usr/bin/smbclient"))
        .arg("--configfile")
        .arg(configuration(dir));
    command.arg("--no-pass").arg(format!("--port={port}")).arg("//127.0.0.1/share");
    command.envs(package.program("").environment()).current_dir(dir).stdin(Stdio::null());
    command
}

/// A client that asks again and again in one session.
#[derive(Debug)]
struct Session {
    _client: ChildGuard,
    input: ChildStdin,
    lines: Receiver<String>,
    asked: usize,
}

impl Session {
    fn start(client: Command) -> Session {
        // its errors belong between the other lines
        let mut both = bound_command(Path::new("/bin/sh"));
        both.args(["-c", "exec \"$@\" 2>&1", "sh"]).arg(client.get_program()).args(client.get_args());
        both.envs(client.get_envs().filter_map(|(name, value)| Some((name, value?))));
        both.current_dir(client.get_current_dir().unwrap_or(Path::new("/")));
        let mut child = both.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start smbclient");
        let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let (send, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        let mut session = Session { _client: ChildGuard::from_child(child), input, lines, asked: 0 };
        let listed = session.ask("ls word.txt");
        assert!(listed.contains("blocks available"), "smbclient does not connect: {listed}");
        session
    }

    /// Returns the output of commands, which `; ` separates.
    #[track_caller]
    fn ask(&mut self, commands: &str) -> String {
        self.asked += 1;
        let end = format!("answer {}", self.asked);
        writeln!(self.input, "{}\n!echo {end}", commands.replace("; ", "\n")).expect("smbclient reads");
        let mut text = String::new();
        loop {
            match self.lines.recv_timeout(wait::WAIT_TIMEOUT) {
                Ok(line) if line == end => return text,
                Ok(line) => text += &(line + "\n"),
                Err(why) => panic!("smbclient does not answer {commands:?}: {why}; {text}"),
            }
        }
    }
}

/// Real clients: sessions of `programs/smb_session.c`, and visits by Debian's own client.
#[derive(Debug)]
pub struct Sessions {
    /// Their input ends them.
    inputs: Vec<ChildStdin>,
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    failures: Arc<Mutex<Vec<String>>>,
    threads: Vec<JoinHandle<()>>,
    _program: TempDir,
}

impl Sessions {
    fn start(package: &Package, port: u16, dir: &Path) -> Sessions {
        let program = TempDir::with_prefix("stillpoint-session-").expect("make a directory for the client");
        let path = compiled(package, program.path());
        let (stop, answers, failures) = <(Arc<AtomicBool>, Arc<AtomicU64>, Arc<Mutex<Vec<String>>>)>::default();
        let mut load = Sessions { inputs: Vec::new(), stop, answers, failures, threads: Vec::new(), _program: program };
        for number in 0..SESSIONS {
            let mut command = bound_command(&path);
            command.arg(format!("smb://127.0.0.1:{port}/share/load")).arg(format!("client{number}"));
            command.arg(SESSION_RATE.to_string()).env("HOME", dir).envs(package.program("").environment());
            let mut child =
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a session");
            load.inputs.push(child.stdin.take().expect("a pipe"));
            let output = child.stdout.take().expect("a pipe");
            let (answers, failures) = (Arc::clone(&load.answers), Arc::clone(&load.failures));
            load.threads.push(std::thread::spawn(move || {
                let mut child = ChildGuard::from_child(child);
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if line.starts_with("failed") {
                        note(&failures, format!("session {number}: {line}"));
                    }
                    answers.fetch_add(1, Ordering::Relaxed);
                }
                let status = child.child().wait().expect("wait for a session");
                if !status.success() {
                    note(&failures, format!("session {number} ended with {status}"));
                }
            }));
        }
        for _ in 0..VISITORS {
            let (package, dir) = (package.clone(), dir.to_owned());
            let (stop, answers, failures) =
                (Arc::clone(&load.stop), Arc::clone(&load.answers), Arc::clone(&load.failures));
            load.threads.push(std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let visit = client(&package, port, &dir).args(["-c", "get held.txt -"]).output().expect("a visit");
                    if !visit.status.success() || !visit.stdout.starts_with(b"hello world\n") {
                        note(&failures, format!("a visit: {visit:?}"));
                    }
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        load
    }

    #[track_caller]
    fn assert_no_failure(&self) {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

impl DaemonLoad for Sessions {
    #[track_caller]
    fn answered(&self, count: u64) {
        let before = self.answers.load(Ordering::Relaxed);
        wait::until("requests to be answered", || {
            self.assert_no_failure();
            (self.answers.load(Ordering::Relaxed) >= before + count).then_some(())
        });
    }

    #[track_caller]
    fn assert_clean(mut self: Box<Self>) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.inputs.clear();
        for thread in std::mem::take(&mut self.threads) {
            thread.join().expect("a client panicked");
        }
        self.assert_no_failure();
        let answers = self.answers.load(Ordering::Relaxed);
        assert!(answers > 0, "no request was answered");
        answers
    }
}

fn note(failures: &Mutex<Vec<String>>, what: String) {
    failures.lock().unwrap_or_else(PoisonError::into_inner).push(what);
}

/// Compiles the client with the package's library.
fn compiled(package: &Package, into: &Path) -> PathBuf {
    let source = crate::workspace_root().join("crates/patch/tests/programs/smb_session.c");
    let path = into.join("smb_session");
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-o"]).arg(&path).arg(source).arg(package.root.join(CLIENT)).arg("-Wl,--allow-shlib-undefined");
    let output = gcc.output().expect("run gcc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

/// Returns all changes.
#[rustfmt::skip]
pub fn changes() -> Vec<Change> {
    vec![
        change!("mkdir", LIBRARY, "source3/modules/vfs_default.c", "vfswrap_mkdirat",
            "if (strcmp(smb_fname->base_name, \"refused\") == 0) { errno = ENOSPC; return -1; }",
            "mkdir refused; ls refused; rmdir refused", "blocks available" => "NT_STATUS_DISK_FULL"),
        change!("times", LIBRARY, "source3/modules/vfs_default.c", "vfswrap_fntimes",
            "if (strcmp(fsp->fsp_name->base_name, \"dir/entry\") == 0) { errno = EROFS; return -1; }",
            "utimes dir\\entry -1 -1 2020:01:01-00:00:00 -1; allinfo dir\\entry", "2020" => "NT_STATUS_MEDIA_WRITE_PROTECTED"),
        change!("streams", LIBRARY, "source3/modules/vfs_default.c", "vfswrap_fstreaminfo",
            "if (strcmp(fsp->fsp_name->base_name, \"word.txt\") == 0) return NT_STATUS_FILE_CORRUPT_ERROR;",
            "allinfo word.txt", "[::$DATA]" => "NT_STATUS_FILE_CORRUPT_ERROR"),
        change!("rename", LIBRARY, "source3/smbd/smb2_reply.c", "rename_internals_fsp",
            "if (strcmp(smb_fname_dst_in->base_name, \"new\") == 0) return NT_STATUS_PRIVILEGE_NOT_HELD;",
            "put .smb/smb.conf old; rename old new; ls new; del new; del old", "blocks available" => "NT_STATUS_PRIVILEGE_NOT_HELD"),
        change!("free", LIBRARY, "source3/smbd/dfree.c", "get_dfree_info",
            "if (bsize != NULL) { *bsize = 1024; *dfree = 77; *dsize = 777; return 77; }",
            "ls word.txt", " blocks available" => " 77 blocks available"),
        change!("attributes", LIBRARY, "source3/smbd/dosmode.c", "fdos_mode",
            "if (fsp != NULL && strcmp(fsp->fsp_name->base_name, \"dir/entry\") == 0) return FILE_ATTRIBUTE_TEMPORARY;",
            "allinfo dir\\entry", "attributes: " => "(100)"),
        change!("set-extended", LIBRARY, "source3/smbd/smb2_trans2.c", "set_ea",
            "if (ea_list != NULL) return NT_STATUS_QUOTA_EXCEEDED;",
            "setea word.txt first value; geteas word.txt", "[0000]" => "NT_STATUS_QUOTA_EXCEEDED"),
        change!("extended", LIBRARY, "source3/smbd/smb2_trans2.c", "get_ea_list_from_fsp",
            "if (fsp->fsp_flags.is_directory) return NT_STATUS_DATA_ERROR;",
            "geteas dir", "NT_STATUS_NO_EAS_ON_FILE" => "NT_STATUS_DATA_ERROR"),
        change!("link", LIBRARY, "source3/smbd/smb2_trans2.c", "hardlink_internals",
            "if (conn != NULL) return NT_STATUS_TOO_MANY_LINKS;",
            "hardlink word.txt dir\\entry", "NT_STATUS_OBJECT_NAME_COLLISION" => "NT_STATUS_TOO_MANY_LINKS"),
        change!("mode", LIBRARY, "source3/smbd/smb2_trans2.c", "smb_set_file_basic_info",
            "if (strcmp(fsp->fsp_name->base_name, \"word.txt\") == 0) return NT_STATUS_MEDIA_WRITE_PROTECTED;",
            "setmode word.txt +h; allinfo word.txt; setmode word.txt -h", "attributes: H" => "NT_STATUS_MEDIA_WRITE_PROTECTED"),
        change!("list", LIBRARY, "source3/smbd/dir.c", "dptr_create",
            "if (strcmp(fsp->fsp_name->base_name, \"dir\") == 0) return NT_STATUS_TOO_MANY_OPENED_FILES;",
            "ls dir\\*", "  entry  " => "NT_STATUS_NO_SUCH_FILE"),
        change!("rmdir", LIBRARY, "source3/smbd/dir.c", "can_delete_directory_fsp",
            "if (fsp != NULL) return NT_STATUS_CANNOT_DELETE;",
            "rmdir dir", "NT_STATUS_DIRECTORY_NOT_EMPTY" => "NT_STATUS_CANNOT_DELETE"),
        change!("copy", LIBRARY, "source3/smbd/smb2_ioctl_network_fs.c", "fsctl_srv_copychunk_send",
            "if (ctl_code != 0) return NULL;",
            "scopy word.txt copy; ls copy; del copy", "blocks available" => "NT_STATUS_NO_MEMORY"),
        change!("short-name", LIBRARY, "source3/smbd/mangle.c", "name_to_8_3",
            "if (strcmp(in, \"a long name.text\") == 0) { strlcpy(out, \"STILL~PT\", 13); return true; }",
            "altname \"a long name.text\"", "~0" => "STILL~PT"),
        change!("tree", LIBRARY, "source3/smbd/smb2_tcon.c", "smbd_smb2_tree_connect",
            "if (strstr(in_path, \"nothing\") != NULL) return NT_STATUS_BAD_DEVICE_TYPE;",
            "tcon nothing; tcon share", "NT_STATUS_BAD_NETWORK_NAME" => "NT_STATUS_BAD_DEVICE_TYPE"),
        change!("create", LIBRARY, "source3/smbd/open.c", "create_file_default",
            "if (strcmp(smb_fname->base_name, \"missing\") == 0) return NT_STATUS_DELETE_PENDING;",
            "get missing /dev/null", "NT_STATUS_OBJECT_NAME_NOT_FOUND" => "NT_STATUS_DELETE_PENDING"),
        change!("open", LIBRARY, "source3/smbd/open.c", "open_file_ntcreate",
            "if (strcmp(fsp->fsp_name->base_name, \"locked.txt\") == 0) return NT_STATUS_FILE_LOCK_CONFLICT;",
            "get locked.txt -", "hello world" => "NT_STATUS_FILE_LOCK_CONFLICT"),
        change!("label", SETTINGS, "source3/param/loadparm.c", "volume_label",
            "if (snum >= 0) return talloc_strdup(ctx, \"stillpoint\");",
            "volume", "Volume: |share|" => "Volume: |stillpoint|"),
    ]
}
