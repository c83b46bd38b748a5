//! Our own programs for patching: compiled, started, announced phases, watched, and examined for residue.
//!
//! A victim is a C or C++ program in `programs`. It shares a page with the test (`programs/control.h`): the test
//! announces which version of the patched functions may answer ([`Phase`]), the victim's threads check each call
//! against it and count. All other data is read from `/proc`, as an operator would: text that differs from the file,
//! threads that were left stopped or traced, a pending SIGTRAP.

use crate::cli::{Run, Stillpoint};
pub use crate::patch_calls::{apply, revert, status};
use crate::server::{ChildGuard, bound_command};
use crate::wait;
use object::{Object, ObjectSymbol, SymbolKind};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;
pub use stillpoint_testing::soak::{is_soak as soak, rounds};
use tempfile::TempDir;

/// Options by which a program is compiled and linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Position-independent executable, bound at start: Debian's default.
    Pie,
    /// Executable at a fixed address, bound lazily.
    Executable,
    /// A shared library.
    Library,
}

impl Kind {
    fn compile_flags(self) -> &'static [&'static str] {
        match self {
            Kind::Pie => &["-fPIE"],
            Kind::Executable => &["-fno-pie"],
            Kind::Library => &["-fPIC"],
        }
    }

    fn link_flags(self) -> &'static [&'static str] {
        match self {
            Kind::Pie => &["-pie", "-Wl,-z,relro,-z,now"],
            Kind::Executable => &["-no-pie", "-Wl,-z,lazy"],
            Kind::Library => &["-shared"],
        }
    }
}

/// Compiler flags of every unit, as in Debian's packages.
const FLAGS: [&str; 8] = [
    "-g",
    "-O2",
    "-fstack-protector-strong",
    "-Wformat",
    "-Werror=format-security",
    "-Wdate-time",
    "-D_FORTIFY_SOURCE=2",
    "-pthread",
];

/// A compiled program, with all that `stillpoint patch build` needs to make a patch for it.
#[derive(Debug)]
pub struct Program {
    name: String,
    unit: String,
    elf: PathBuf,
    dir: TempDir,
}

impl Program {
    /// Compiles `programs/NAME.c` as a [`Kind::Pie`].
    #[track_caller]
    pub fn build(name: &str) -> Program {
        Program::build_as(name, Kind::Pie, &[], &[])
    }

    /// Compiles `programs/NAME.c`, or `NAME.cc`, with further flags for the compiler and the linker.
    #[track_caller]
    pub fn build_as(name: &str, kind: Kind, compile: &[&str], link: &[&str]) -> Program {
        let dir = TempDir::with_prefix("stillpoint-program-").expect("make a directory for the program");
        let source = dir.path().join("source");
        fs::create_dir(&source).expect("make a directory for the source");
        let programs = crate::workspace_root().join("crates/patch/tests/programs");
        let cxx = programs.join(format!("{name}.cc")).exists();
        let (compiler, unit) = if cxx { ("g++", format!("{name}.cc")) } else { ("gcc", format!("{name}.c")) };
        for file in ["control.h", &unit] {
            let from = programs.join(file);
            fs::copy(&from, source.join(file)).unwrap_or_else(|e| panic!("copy {}: {e}", from.display()));
        }
        let elf = dir.path().join(if kind == Kind::Library { format!("lib{name}.so") } else { name.to_owned() });
        let object = format!("{name}.o");
        let mut words = vec![compiler];
        // <stdatomic.h>, which C programs and C++ ones share, requires C++23
        let standard: &[&str] = if cxx { &["-std=gnu++23"] } else { &[] };
        words.extend(FLAGS.iter().chain(kind.compile_flags()).chain(standard).chain(compile));
        words.extend(["-c", &unit, "-o", &object]);
        run_in(&source, Command::new(words[0]).args(&words[1..]));
        run_in(
            &source,
            Command::new(compiler).args(["-pthread", &object, "-o"]).arg(&elf).args(kind.link_flags()).args(link),
        );
        let commands = serde_json::json!([{"directory": &source, "arguments": words, "file": unit}]);
        fs::write(dir.path().join("compile_commands.json"), commands.to_string()).expect("write compile_commands.json");
        Program { name: name.to_owned(), unit, elf, dir }
    }

    /// Removes the symbols, as Debian's packages are shipped.
    #[track_caller]
    pub fn strip(self) -> Program {
        run_in(self.dir.path(), Command::new("strip").arg(&self.elf));
        self
    }

    /// Returns the compiled file.
    pub fn elf(&self) -> &Path {
        &self.elf
    }

    /// Returns the directory of the program, for further files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Makes a diff that turns version `from` of the source into `to`.
    pub fn diff(&self, from: u32, to: u32) -> PathBuf {
        let unit = &self.unit;
        let text = fs::read_to_string(self.dir.path().join("source").join(unit)).expect("read the source");
        let line = 1 + text.lines().position(|line| line == "#define VERSION 1").expect("the source has a version");
        let diff = format!(
            "--- a/{unit}\n+++ b/{unit}\n@@ -{line} +{line} @@\n-#define VERSION {from}\n+#define VERSION {to}\n"
        );
        let path = self.dir.path().join(format!("{}-{from}-{to}.diff", self.name));
        fs::write(&path, diff).expect("write the diff");
        path
    }

    /// Makes a call of `stillpoint patch build` for version `to` from the source as shipped; add options as needed.
    pub fn builder(&self, to: u32, output: &Path) -> Stillpoint {
        self.build_of(&self.diff(1, to), output)
    }

    fn build_of(&self, diff: &Path, output: &Path) -> Stillpoint {
        let directory = self.dir.path();
        Stillpoint::new()
            .args(["patch", "build", "--source"])
            .arg(directory.join("source"))
            .arg("--compile-commands")
            .arg(directory.join("compile_commands.json"))
            .arg("--target")
            .arg(&self.elf)
            .arg("--diff")
            .arg(diff)
            .arg("--output")
            .arg(output)
    }

    /// Makes a patch with version `to`, from the source as shipped.
    #[track_caller]
    pub fn patch(&self, to: u32) -> PathBuf {
        self.patch_with(to, &[])
    }

    /// Makes a patch with version `to`, with further options for `patch build`.
    #[track_caller]
    pub fn patch_with(&self, to: u32, options: &[&str]) -> PathBuf {
        let path = self.dir.path().join(format!("{}-{to}.patch", self.name));
        self.builder(to, &path).args(options.iter().copied()).succeed();
        path
    }

    /// Makes a patch with version `to` on top of the patch `earlier`, which has version `from`.
    #[track_caller]
    pub fn patch_on_top(&self, earlier: &Path, from: u32, to: u32) -> PathBuf {
        self.patch_on_top_with(earlier, from, to, &[])
    }

    /// Makes a patch as [`Program::patch_on_top`] does, with further options for `patch build`.
    #[track_caller]
    pub fn patch_on_top_with(&self, earlier: &Path, from: u32, to: u32, options: &[&str]) -> PathBuf {
        let path = self.dir.path().join(format!("{}-{from}-{to}.patch", self.name));
        let call = self.build_of(&self.diff(from, to), &path).args(options.iter().copied());
        call.arg("--on-top-of").arg(self.diff(1, from)).arg("--earlier").arg(earlier).succeed();
        path
    }

    /// Starts it: `NAME CONTROL ARGUMENTS...`.
    #[track_caller]
    pub fn start(&self, arguments: &[&str]) -> Victim {
        self.start_in(bound_command, arguments)
    }

    /// Starts it through a command that `wrap` makes and that ends with the program's path; the victim is then the
    /// child itself or the descendant that runs the program.
    #[track_caller]
    pub fn start_in(&self, wrap: impl FnOnce(&Path) -> Command, arguments: &[&str]) -> Victim {
        Victim::start(wrap(&self.elf), &self.elf, arguments)
    }
}

#[track_caller]
fn run_in(directory: &Path, command: &mut Command) {
    let output = command.current_dir(directory).output().unwrap_or_else(|e| panic!("run {command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// Versions that may answer from now on, see `programs/control.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Settled: this version answers every call that begins now.
    Settled(u8),
    /// Each thread migrates from the first to the second once.
    Over(u8, u8),
    /// Each thread may migrate from the first to the second, and back.
    OverAndBack(u8, u8),
    /// Either version answers.
    Either(u8, u8),
}

impl Phase {
    fn word(self, epoch: u32) -> u64 {
        let (flags, from, to) = match self {
            Phase::Settled(version) => (0, version, version),
            Phase::Over(from, to) => (0, from, to),
            Phase::OverAndBack(from, to) => (1, from, to),
            Phase::Either(from, to) => (2, from, to),
        };
        u64::from(epoch) << 32 | flags << 16 | u64::from(to) << 8 | u64::from(from)
    }
}

/// One thread of a victim, as it describes itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Activity of the thread.
    pub role: String,
    /// Calls of patched functions so far.
    pub calls: u64,
    /// The version that answered last.
    pub version: u32,
    /// Its thread id, in its own PID namespace.
    pub tid: i32,
}

// Offsets of `struct control`.
const VIOLATIONS: u64 = 8;
const SLOTS_USED: u64 = 16;
const STOP: u64 = 20;
const COMMAND: u64 = 24;
const READY: u64 = 28;
const MESSAGE: u64 = 32;
const SLOTS: u64 = 256;
const SLOT: u64 = 64;
const SLOTS_MAX: u64 = 256;

/// A running program under test.
#[derive(Debug)]
pub struct Victim {
    process: ChildGuard,
    pid: i32,
    elf: PathBuf,
    control: File,
    epoch: Cell<u32>,
    log: PathBuf,
    /// Text before the first operation on it.
    text: Text,
    _dir: TempDir,
}

impl Victim {
    #[track_caller]
    fn start(mut command: Command, elf: &Path, arguments: &[&str]) -> Victim {
        let dir = TempDir::with_prefix("stillpoint-victim-").expect("make a directory for the victim");
        let path = dir.path().join("control");
        let control =
            File::options().read(true).write(true).create_new(true).open(&path).expect("make the shared page");
        // Victims that run as another user open it too.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("publish the directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("publish the shared page");
        control.set_len(SLOTS + SLOT * SLOTS_MAX).expect("size the shared page");
        control.write_all_at(&Phase::Settled(1).word(1).to_le_bytes(), 0).expect("announce");
        let log = dir.path().join("log");
        let output = File::create(&log).expect("make the victim's log");
        command.arg(&path).args(arguments).stdin(Stdio::piped());
        command.stdout(output.try_clone().expect("share the log")).stderr(output);
        let child = command.spawn().unwrap_or_else(|e| panic!("start {command:?}: {e}"));
        let mut process = ChildGuard::from_child(child);
        let pid = wait::until(&format!("{} to run", elf.display()), || {
            if let Some(status) = process.ended() {
                panic!("{command:?} ended with {status}:\n{}", fs::read_to_string(&log).unwrap_or_default());
            }
            descendant(process.pid(), elf)
        });
        let text = Text::default();
        let mut victim =
            Victim { process, pid, elf: elf.to_owned(), control, epoch: Cell::new(1), log, text, _dir: dir };
        wait::until("the victim's threads to begin", || {
            victim.assert_running();
            (u32::from_le_bytes(victim.read(READY)) == 1).then_some(())
        });
        victim.text = Text::of(pid);
        victim
    }

    /// Returns its process id, as this test sees it.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns the process that was started: the victim, or its wrapper.
    pub fn process(&mut self) -> &mut ChildGuard {
        &mut self.process
    }

    /// Returns its standard input.
    pub fn stdin(&mut self) -> &mut ChildStdin {
        self.process.child().stdin.as_mut().expect("standard input is a pipe")
    }

    /// Announces which versions may answer from now on.
    pub fn announce(&self, phase: Phase) {
        self.epoch.set(self.epoch.get() + 1);
        self.control.write_all_at(&phase.word(self.epoch.get()).to_le_bytes(), 0).expect("announce");
    }

    /// Sends the only command of the victim.
    pub fn command(&self) {
        self.control.write_all_at(&1u32.to_le_bytes(), COMMAND).expect("command");
    }

    /// Returns true until the victim has taken the command.
    pub fn is_commanded(&self) -> bool {
        u32::from_le_bytes(self.read(COMMAND)) != 0
    }

    /// Requests its end.
    pub fn stop(&self) {
        self.control.write_all_at(&1u32.to_le_bytes(), STOP).expect("command");
    }

    /// Returns its threads.
    pub fn slots(&self) -> Vec<Slot> {
        let used = u64::from(u32::from_le_bytes(self.read(SLOTS_USED))).min(SLOTS_MAX);
        (0..used)
            .map(|i| {
                let bytes: [u8; SLOT as usize] = self.read(SLOTS + i * SLOT);
                let role = bytes[16..].split(|b| *b == 0).next().unwrap_or_default();
                Slot {
                    role: String::from_utf8_lossy(role).into_owned(),
                    calls: u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")),
                    version: u32::from_le_bytes(bytes[8..12].try_into().expect("4 bytes")),
                    tid: i32::from_le_bytes(bytes[12..16].try_into().expect("4 bytes")),
                }
            })
            .collect()
    }

    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.control.read_exact_at(&mut bytes, offset).expect("read the shared page");
        bytes
    }

    /// Panics if the victim has ended, or has found an error.
    #[track_caller]
    pub fn assert_running(&mut self) {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        if let Some(status) = self.process.ended() {
            panic!("{} ended with {status}\n{log}", self.elf.display());
        }
        self.assert_consistent();
    }

    /// Panics if the victim has found an error.
    #[track_caller]
    pub fn assert_consistent(&self) {
        let violations = u64::from_le_bytes(self.read(VIOLATIONS));
        let message: [u8; (SLOTS - MESSAGE) as usize] = self.read(MESSAGE);
        let message = String::from_utf8_lossy(message.split(|b| *b == 0).next().unwrap_or_default()).into_owned();
        assert_eq!(violations, 0, "{}: {message}", self.elf.display());
    }

    /// Waits until each thread that calls patched functions has done so twice more: it runs, and is not stopped.
    #[track_caller]
    pub fn assert_answering(&mut self) {
        self.assert_answering_within(wait::WAIT_TIMEOUT);
    }

    /// Waits as [`Victim::assert_answering`] does, with another time limit.
    #[track_caller]
    pub fn assert_answering_within(&mut self, limit: Duration) {
        let before = self.slots();
        let moved = wait::within(limit, || {
            self.assert_running();
            let now = self.slots();
            before.iter().zip(&now).all(|(a, b)| idle(&a.role) || b.calls >= a.calls + 2).then_some(())
        });
        if moved.is_none() {
            let now = self.slots();
            let stuck = before.iter().zip(&now).filter(|(a, b)| !idle(&a.role) && b.calls < a.calls + 2);
            let stuck: Vec<String> = stuck.map(|(_, b)| format!("{b:?} ({})", thread_state(self.pid, b.tid))).collect();
            panic!("threads do not answer within {limit:?}: {stuck:#?}");
        }
    }

    /// Settles on `version`: it answers each call from now on, and all threads answer.
    #[track_caller]
    pub fn assert_settled(&mut self, version: u8) {
        self.announce(Phase::Settled(version));
        self.assert_answering();
        for slot in self.slots() {
            assert!(idle(&slot.role) || slot.version == u32::from(version), "{slot:?}, version {version} expected");
        }
    }

    /// Panics if a tool has left residue: a stopped or traced thread, a SIGTRAP, a breakpoint, half a jump.
    #[track_caller]
    pub fn assert_no_residue(&self) {
        let residue = residue(self.pid);
        assert!(residue.is_empty(), "left behind: {residue:#?}");
        let maps = Maps::of(self.pid);
        let bias = maps.bias(&self.elf);
        let mut entries: BTreeMap<u64, String> =
            function_entries(&self.elf).into_iter().map(|(entry, name)| (entry + bias, name)).collect();
        entries.extend(guided(&maps));
        let now = Text::of(self.pid);
        for (start, bytes) in &self.text.ranges {
            let Some(current) = now.ranges.get(start) else { panic!("the text at {start:#x} is no longer mapped") };
            let mut at = 0;
            while let Some(offset) = (at..bytes.len()).find(|i| bytes[*i] != current[*i]) {
                at = offset + 1;
                let address = start + offset as u64;
                let entry = entries.range(..=address).next_back().filter(|(entry, _)| address < **entry + 5);
                let Some((&entry, name)) = entry else {
                    panic!("the byte at {address:#x} changed from {:#x} to {:#x}", bytes[offset], current[offset])
                };
                let jump = &current[(entry - start) as usize..][..5];
                let target = entry
                    .wrapping_add(5)
                    .wrapping_add_signed(i64::from(i32::from_le_bytes([jump[1], jump[2], jump[3], jump[4]])));
                assert!(
                    jump[0] == 0xe9 && maps.is_executable(target),
                    "the entry of {name} is no jump to code: {jump:x?} (to {target:#x})"
                );
            }
        }
    }

    /// Applies a patch with version 2 and reverts it, and asserts that no change is left.
    #[track_caller]
    pub fn there_and_back(&mut self, patch: &Path) {
        self.announce(Phase::Over(1, 2));
        apply(patch, self.pid()).succeed();
        self.assert_settled(2);
        self.announce(Phase::Over(2, 1));
        revert(self.pid()).succeed();
        self.assert_settled(1);
        self.assert_pristine();
    }

    /// Panics unless the text is byte for byte the same as at the program's start.
    #[track_caller]
    pub fn assert_pristine(&self) {
        let residue = residue(self.pid);
        assert!(residue.is_empty(), "left behind: {residue:#?}");
        assert_eq!(self.text.difference(&Text::of(self.pid)), None, "the text is not as it was");
    }

    /// Returns all state that a refused operation must not change.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(self.pid)
    }
}

impl Drop for Victim {
    /// Ends by itself where it can: a wrapper (`unshare`) would ignore SIGTERM.
    fn drop(&mut self) {
        self.stop();
        wait::within(std::time::Duration::from_secs(2), || self.process.ended());
    }
}

/// Returns true for roles of threads that make no calls while they wait.
fn idle(role: &str) -> bool {
    matches!(role, "blocked" | "sleeper" | "")
}

/// Returns the process that executes `elf`: `pid`, or a descendant.
fn descendant(pid: i32, elf: &Path) -> Option<i32> {
    let exe = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    if exe.file_name() == elf.file_name() {
        return Some(pid);
    }
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().filter_map(|child| child.parse().ok()).find_map(|child| descendant(child, elf))
}

fn thread_state(pid: i32, tid: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).unwrap_or_else(|e| e.to_string());
    let wanted = |line: &&str| ["State", "TracerPid", "SigPnd"].iter().any(|key| line.starts_with(key));
    let syscall = fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).unwrap_or_default();
    status.lines().filter(wanted).chain([syscall.trim()]).collect::<Vec<_>>().join("; ")
}

/// Returns residue of a tool on a process's threads: stopped ones, traced ones, a pending SIGTRAP.
pub fn residue(pid: i32) -> Vec<String> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return vec![format!("process {pid} is gone")] };
    let mut found = Vec::new();
    for task in tasks.flatten() {
        // A thread that ends meanwhile leaves no residue.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        let value = |key| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim).unwrap_or_default();
        let mut complain = |what: String| found.push(format!("thread {}: {what}", task.file_name().display()));
        if value("State:").starts_with(['t', 'T']) {
            complain(value("State:").to_owned());
        }
        if value("TracerPid:") != "0" && !value("TracerPid:").is_empty() {
            complain(format!("traced by {}", value("TracerPid:")));
        }
        for key in ["SigPnd:", "ShdPnd:"] {
            // Signal 5 is bit 4.
            if u64::from_str_radix(value(key), 16).is_ok_and(|mask| mask & 0x10 != 0) {
                complain(format!("SIGTRAP waits ({key} {})", value(key)));
            }
        }
    }
    found
}

/// Returns addresses (as in the file) and names of the functions.
fn function_entries(elf: &Path) -> BTreeMap<u64, String> {
    let bytes = fs::read(elf).unwrap_or_else(|e| panic!("read {}: {e}", elf.display()));
    let file = object::File::parse(&*bytes).unwrap_or_else(|e| panic!("parse {}: {e}", elf.display()));
    let functions = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.is_definition());
    functions.map(|symbol| (symbol.address(), symbol.name().unwrap_or("?").to_owned())).collect()
}

/// Returns the one entry of the C library that patches redirect: unwinders get unwind data from it.
fn guided(maps: &Maps) -> Option<(u64, String)> {
    const NAME: &str = "_dl_find_object";
    let library = maps.0.iter().find(|m| m.offset == 0 && m.path.ends_with("/libc.so.6"))?;
    let bytes = fs::read(&library.path).ok()?;
    let file = object::File::parse(&*bytes).ok()?;
    let symbol = file.dynamic_symbols().find(|symbol| symbol.name() == Ok(NAME))?;
    Some((library.start + symbol.address(), NAME.to_owned()))
}

/// One line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First address of the mapping.
    pub start: u64,
    /// End address, one past the last.
    pub end: u64,
    /// Permissions, for instance `r-xp`.
    pub permissions: String,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The file, or a name in brackets; empty for anonymous memory.
    pub path: String,
}

/// All lines of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Maps(pub Vec<Mapping>);

impl Maps {
    /// Reads the mappings of a process; empty when it is gone.
    pub fn of(pid: i32) -> Maps {
        let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        Maps(text.lines().filter_map(Maps::line).collect())
    }

    fn line(line: &str) -> Option<Mapping> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let permissions = words.next()?.to_owned();
        let offset = hex(words.next()?)?;
        let path = words.skip(2).collect::<Vec<_>>().join(" ");
        Some(Mapping { start: hex(start)?, end: hex(end)?, permissions, offset, path })
    }

    fn is_executable(&self, address: u64) -> bool {
        self.0.iter().any(|m| (m.start..m.end).contains(&address) && m.permissions.contains('x'))
    }

    /// Returns the offset between addresses of the file and of memory; 0 for an executable at fixed addresses.
    fn bias(&self, elf: &Path) -> u64 {
        let name = elf.display().to_string();
        let first = self.0.iter().find(|m| m.offset == 0 && m.path.trim_end_matches(" (deleted)") == name);
        let first = first.map_or(0, |m| m.start);
        if first < 0x1000_0000 { 0 } else { first }
    }
}

/// The bytes of all executable mappings of files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Text {
    ranges: BTreeMap<u64, Vec<u8>>,
}

impl Text {
    fn of(pid: i32) -> Text {
        let Ok(memory) = File::open(format!("/proc/{pid}/mem")) else { return Text::default() };
        let read = |m: &Mapping| {
            let mut bytes = vec![0; (m.end - m.start) as usize];
            memory.read_exact_at(&mut bytes, m.start).ok().map(|()| (m.start, bytes))
        };
        let code =
            |m: &&Mapping| m.permissions.contains('x') && m.path.starts_with('/') && !m.path.starts_with("/memfd:");
        Text { ranges: Maps::of(pid).0.iter().filter(code).filter_map(read).collect() }
    }

    /// Returns place and kind of the first difference from `other`.
    fn difference(&self, other: &Text) -> Option<String> {
        for (start, bytes) in &self.ranges {
            let Some(now) = other.ranges.get(start) else { return Some(format!("{start:#x} is no longer mapped")) };
            if let Some(at) = (0..bytes.len()).find(|i| bytes[*i] != now[*i]) {
                let end = bytes.len().min(at + 8);
                return Some(format!("{:#x}: {:x?} became {:x?}", start + at as u64, &bytes[at..end], &now[at..end]));
            }
        }
        None
    }
}

/// State that must be the same before and after an operation without effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    maps: Maps,
    text: Text,
    threads: Vec<String>,
    descriptors: usize,
}

impl Snapshot {
    /// Takes the state of a process.
    pub fn of(pid: i32) -> Snapshot {
        let list = |what: &str| {
            let entries = fs::read_dir(format!("/proc/{pid}/{what}")).into_iter().flatten().flatten();
            let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        };
        Snapshot { maps: Maps::of(pid), text: Text::of(pid), threads: list("task"), descriptors: list("fd").len() }
    }

    /// Panics unless the process is unchanged.
    #[track_caller]
    pub fn assert_untouched(&self, pid: i32) {
        let now = Snapshot::of(pid);
        assert_eq!(self.maps, now.maps, "the memory map of {pid} changed");
        assert_eq!(self.text.difference(&now.text), None, "the text of {pid} changed");
        assert_eq!(self.threads, now.threads, "the threads of {pid} changed");
        assert_eq!(self.descriptors, now.descriptors, "the descriptors of {pid} changed");
        let residue = residue(pid);
        assert!(residue.is_empty(), "left behind: {residue:#?}");
    }
}

/// Panics unless a command refused, with each of the texts in its message.
#[track_caller]
pub fn refused(run: &Run, texts: &[&str]) {
    assert_eq!(run.code, Some(3), "{run}");
    for text in texts {
        assert!(run.stderr.contains(text), "{text:?}: {run}");
    }
}

/// Panics unless the call was refused with one clear line that names `thing`.
#[track_caller]
pub fn assert_refused(run: &Run, thing: &str) {
    assert_eq!(run.code, Some(3), "{run}");
    let errors: Vec<&str> = run.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one error is expected\n{run}");
    assert!(run.stderr.to_lowercase().contains(&thing.to_lowercase()), "{thing:?} is not named\n{run}");
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {} calls, version {}", self.role, self.tid, self.calls, self.version)
    }
}

/// Tests that the victims detect the errors that they are made to detect.
#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn fails(what: impl FnOnce()) -> bool {
        catch_unwind(AssertUnwindSafe(what)).is_err()
    }

    #[test]
    fn an_unpatched_victim_is_consistent_and_pristine() {
        for (name, arguments) in [("victim", &["2"][..]), ("prologues", &["2"]), ("blocked", &["--contract"])] {
            let program = Program::build(name);
            let mut victim = program.start(arguments);
            victim.assert_settled(1);
            victim.assert_no_residue();
            victim.assert_pristine();
            let before = victim.snapshot();
            victim.assert_answering();
            before.assert_untouched(victim.pid());
        }
    }

    #[test]
    fn the_wrong_version_is_a_violation() {
        let program = Program::build("victim");
        let mut victim = program.start(&["2"]);
        assert!(fails(|| victim.assert_settled(2)));
    }

    #[test]
    fn a_byte_of_the_text_that_changed_is_residue() {
        for (byte, len) in [(0xcc, 1), (0xe9, 1), (0x90, 5)] {
            let program = Program::build("victim");
            let victim = program.start(&["2"]);
            let entries = function_entries(program.elf());
            let (entry, _) = entries.iter().find(|(_, name)| *name == "never_called").expect("the function is there");
            let address = Maps::of(victim.pid()).bias(program.elf()) + entry;
            let memory = File::options().write(true).open(format!("/proc/{}/mem", victim.pid())).expect("open mem");
            memory.write_all_at(&vec![byte; len], address).expect("write an entry");
            assert!(fails(|| victim.assert_no_residue()), "{byte:#x}");
            assert!(fails(|| victim.assert_pristine()), "{byte:#x}");
        }
    }

    #[test]
    fn a_stopped_victim_does_not_answer() {
        let program = Program::build("victim");
        let mut victim = program.start(&["2"]);
        victim.process().signal(rustix::process::Signal::STOP);
        wait::until("the victim to stop", || (!residue(victim.pid()).is_empty()).then_some(()));
        victim.process().signal(rustix::process::Signal::CONT);
        victim.assert_answering();
        assert!(residue(victim.pid()).is_empty());
    }
}
