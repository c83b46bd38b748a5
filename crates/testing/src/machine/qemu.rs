//! One emulated machine.

use super::guest::{Guest, packaging};
use super::network::{Network, PortAccess};
use super::shell::{Output, Shell};
use crate::child::{ChildGuard, bound_command};
use crate::wait;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Limit for a boot under emulation, on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(600);
/// Limit for a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(180);
/// Limit for one of several attempts at a command.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(6);
/// Limit for a command that only tests something.
const TEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Consecutive tests without an end while a machine boots; after them it counts as slow.
const TESTS_WITHOUT_END_MAX: u32 = 25;
/// Time between two tests of a machine: each starts programs in it, and an emulated processor has little time.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Kernel command line: without features that only cost time under emulation. After a panic the kernel restarts, and
/// when it ends it leaves a watchdog running.
const COMMAND_LINE: &str = "console=ttyS0 no_timer_check cryptomgr.notests mitigations=off panic=1 net.ifnames=0 loglevel=4 quiet \
                            random.trust_cpu=on watchdog.stop_on_reboot=0";

/// A running machine; it ends with this value.
pub struct Machine {
    // it ends before its network is removed
    emulator: ChildGuard,
    network: Network,
    shell: Shell,
    dir: TempDir,
    /// Consecutive tests that had no end.
    tests_without_end: u32,
}

/// Source of a machine's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Time of the host; other work takes its share of it.
    Host,
    /// Instructions of one processor, each a nanosecond; while it waits, the host's time.
    Instructions,
}

impl Clock {
    /// Returns arguments of the emulator. A string instruction that moves one byte at a time would count one for each
    /// byte: processors that do that quickly set a flag, and this one does not.
    fn emulator(self) -> &'static str {
        match self {
            Clock::Host => "-accel tcg,thread=multi -cpu max -smp 2",
            Clock::Instructions => {
                "-accel tcg,thread=single -icount shift=0,sleep=on -cpu max,erms=off,fsrm=off -smp 1"
            }
        }
    }

    /// Returns arguments of the kernel. By default it prefers another clock, whose steps are long.
    fn kernel(self) -> &'static str {
        match self {
            Clock::Host => "",
            Clock::Instructions => "tsc=reliable",
        }
    }
}

/// Properties of a machine beside its disk.
#[derive(Debug, Clone, Copy)]
pub struct Shape<'s> {
    /// Source of its clock.
    pub clock: Clock,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// Additional arguments on its kernel command line.
    pub append: &'s str,
    /// MiB of a second disk, `/dev/vdc`, of zeros; 0 for none.
    pub disk_mib: u32,
    /// Programs that are installed beside the tool.
    pub programs: &'s [&'s Path],
}

impl Default for Shape<'_> {
    fn default() -> Self {
        Shape { clock: Clock::Host, memory_mib: 1536, append: "", disk_mib: 0, programs: &[] }
    }
}

/// Prefix of a panic if the emulator ended by an assertion of its own.
pub(crate) const EMULATOR_BROKE: &str = "the emulator ended with signal: 6";

impl Machine {
    /// Boots a kernel and waits for its shell; the tool is installed as `make install` would.
    #[track_caller]
    pub fn boot(guest: &Guest, kernel: &str, tool: &Path) -> Machine {
        Machine::boot_as(guest, kernel, tool, Shape::default())
    }

    /// Boots a kernel on a machine with other properties, and waits for its shell.
    #[track_caller]
    pub fn boot_as(guest: &Guest, kernel: &str, tool: &Path, shape: Shape<'_>) -> Machine {
        let mut machine = start(guest, kernel, tool, shape).unwrap_or_else(|why| panic!("no machine: {why}"));
        machine.wait_for(kernel);
        machine.succeed(
            "mkdir -p /run/tool && mount -o ro /dev/vdb /run/tool && cp -a /run/tool/root/. / && umount /run/tool && sync",
        );
        machine
    }

    /// Waits until this kernel runs and its shell answers.
    #[track_caller]
    pub fn wait_for(&mut self, kernel: &str) {
        let end = Instant::now() + BOOT_TIMEOUT;
        while Instant::now() < end {
            if self.try_run("uname -r").is_some_and(|output| output.text.trim() == kernel) {
                return;
            }
        }
        panic!("waited {BOOT_TIMEOUT:?} for kernel {kernel}\n{}", self.console());
    }

    /// Runs a command in the machine.
    #[track_caller]
    pub fn run(&mut self, command: &str) -> Output {
        let output = self.shell.run(command, COMMAND_TIMEOUT);
        output.unwrap_or_else(|| panic!("`{command}` did not end\n{}", self.console()))
    }

    /// Runs a command that must succeed, and returns its output.
    #[track_caller]
    pub fn succeed(&mut self, command: &str) -> String {
        let Output { code, text } = self.run(command);
        assert_eq!(code, 0, "`{command}` printed: {text}\n{}", self.console());
        text
    }

    /// Runs a command that only tests something; `None` if it did not end, because the kernel changed or the machine is
    /// slow. The next command interrupts it.
    pub fn try_run(&mut self, command: &str) -> Option<Output> {
        let limit = if self.tests_without_end < TESTS_WITHOUT_END_MAX { TEST_TIMEOUT } else { ATTEMPT_TIMEOUT };
        let output = self.run_within(command, limit);
        self.tests_without_end = if output.is_some() { 0 } else { self.tests_without_end + 1 };
        output
    }

    /// Runs a command within a limit; `None` if it did not end.
    pub fn run_within(&mut self, command: &str, limit: Duration) -> Option<Output> {
        let output = self.shell.run(command, limit);
        if let Some(how) = self.emulator.ended() {
            // the text of EMULATOR_BROKE
            panic!("the emulator ended with {how}\n{}", self.console());
        }
        output
    }

    /// Repeats a command until it succeeds, over boots of any kernel.
    #[track_caller]
    pub fn run_until_success(&mut self, command: &str) -> String {
        let end = Instant::now() + BOOT_TIMEOUT;
        while Instant::now() < end {
            match self.run_within(command, ATTEMPT_TIMEOUT) {
                Some(Output { code: 0, text }) => return text,
                _ => std::thread::sleep(POLL_INTERVAL),
            }
        }
        panic!("waited {BOOT_TIMEOUT:?} in vain for `{command}` to succeed\n{}", self.console());
    }

    /// Connects from outside.
    #[track_caller]
    pub fn connect(&self, port: u16) -> TcpStream {
        let door = self.port_access(port);
        let made = wait::within(Duration::from_secs(60), || door.connect(Duration::from_secs(5)).ok());
        made.unwrap_or_else(|| panic!("nothing listens on port {port}\n{}", self.console()))
    }

    /// Returns an access for clients that connect repeatedly.
    pub fn port_access(&self, port: u16) -> PortAccess {
        self.network.port_access(port)
    }

    /// Returns a command that runs outside of the machine, on its network.
    pub fn outside_command(&self, program: &Path) -> Command {
        let mut command = bound_command("ip".as_ref());
        command.args(["netns", "exec", &self.network.name]).arg(program);
        command
    }

    /// Interrupts the power: the boot loader then starts the first kernel.
    pub fn reset(&mut self) {
        self.monitor("system_reset");
    }

    fn monitor(&self, command: &str) {
        let path = self.dir.path().join("monitor");
        let mut stream = UnixStream::connect(&path).expect("the emulator listens");
        stream.write_all(format!("{command}\n").as_bytes()).expect("ask the emulator");
        // it answers when it has executed the command
        let mut answer = [0; 4096];
        let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
        while std::io::Read::read(&mut stream, &mut answer).is_ok_and(|n| n > 0) {}
    }

    /// Returns the last lines of its console.
    pub fn console(&self) -> String {
        let text = fs::read(self.dir.path().join("console")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let end = lines[lines.len().saturating_sub(60)..].join("\n");
        match self.emulator_output() {
            emulator_output if emulator_output.is_empty() => format!("--- the end of its console\n{end}"),
            emulator_output => {
                format!("--- output of the emulator\n{emulator_output}\n--- the end of its console\n{end}")
            }
        }
    }

    /// Returns the output of the emulator itself, which is mostly empty.
    fn emulator_output(&self) -> String {
        fs::read_to_string(self.dir.path().join("qemu.log")).unwrap_or_default().trim().to_owned()
    }
}

fn start(guest: &Guest, kernel: &str, tool: &Path, shape: Shape<'_>) -> Result<Machine, String> {
    let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
    let disk = tool_disk(dir.path(), guest, tool, shape.programs)?;
    let network = Network::make()?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let of_guest = |name: String| guest.dir.join(name).display().to_string();
    let mut command = bound_command("ip".as_ref());
    command.args(["netns", "exec", &network.name]).arg(guest.dir.join("qemu"));
    command.args(shape.clock.emulator().split(' '));
    command.args("-display none -nodefaults -no-user-config".split(' '));
    command.args(["-m", &shape.memory_mib.to_string()]);
    command.arg("-kernel").arg(guest.image(kernel)).arg("-initrd").arg(guest.initrd(kernel, dir.path())?);
    let words = [COMMAND_LINE, shape.clock.kernel(), shape.append].into_iter().filter(|words| !words.is_empty());
    command.args(["-append", &words.collect::<Vec<_>>().join(" ")]);
    // changes go to an unnamed file, which is removed with the emulator
    let root = of_guest("root.ext4".into());
    command.args(["-drive", &format!("file={root},if=virtio,format=raw,snapshot=on,cache=unsafe")]);
    command.args(["-drive", &format!("file={},if=virtio,format=raw,readonly=on", disk.display())]);
    if shape.disk_mib > 0 {
        let file = fs::File::create(path("disk")).map_err(|error| error.to_string())?;
        file.set_len(u64::from(shape.disk_mib) << 20).map_err(|error| error.to_string())?;
        command.args(["-drive", &format!("file={},if=virtio,format=raw,cache=unsafe", path("disk"))]);
    }
    command.args(["-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no"]);
    command.args(["-device", "virtio-net-pci,netdev=n0,romfile="]);
    command.args(["-device", "i6300esb", "-action", "watchdog=reset"]);
    command.args(["-serial", &format!("file:{}", path("console"))]);
    command.args(["-serial", &format!("unix:{},server=on,wait=off", path("shell"))]);
    command.args(["-monitor", &format!("unix:{},server=on,wait=off", path("monitor"))]);
    let log = fs::File::create(dir.path().join("qemu.log")).map_err(|error| error.to_string())?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).env("TMPDIR", dir.path());
    let child = command.spawn().map_err(|error| format!("the emulator: {error}"))?;
    let mut emulator = ChildGuard::from_child(child);
    let stream = wait::within(Duration::from_secs(60), || match UnixStream::connect(dir.path().join("shell")) {
        Ok(stream) => Some(Some(stream)),
        Err(_) => emulator.ended().map(|_| None),
    });
    let emulator_output = || fs::read_to_string(dir.path().join("qemu.log")).unwrap_or_default();
    let stream = stream.flatten().ok_or_else(|| format!("the emulator did not start: {}", emulator_output()))?;
    let shell = Shell::new(stream).map_err(|error| error.to_string())?;
    Ok(Machine { emulator, network, shell, dir, tests_without_end: 0 })
}

/// Makes a disk with the files of `make install`, and kernels that the machine's own disk does not have.
fn tool_disk(dir: &Path, guest: &Guest, tool: &Path, programs: &[&Path]) -> Result<PathBuf, String> {
    let root = dir.join("tool/root");
    let bin = root.join("usr/local/bin");
    fs::create_dir_all(&bin).map_err(|error| error.to_string())?;
    run(Command::new("strip").arg("-o").arg(bin.join("stillpoint")).arg(tool))?;
    if !programs.is_empty() {
        run(Command::new("cp").arg("-t").arg(&bin).args(programs))?;
    }
    let generators = root.join("usr/lib/systemd/system-generators");
    fs::create_dir_all(&generators).map_err(|error| error.to_string())?;
    let from = packaging().join("generators/stillpoint-kernel");
    let text = fs::read_to_string(&from).map_err(|error| format!("{}: {error}", from.display()))?;
    let to = generators.join("stillpoint-kernel");
    fs::write(&to, text.replace("@PREFIX@", "/usr/local")).map_err(|error| error.to_string())?;
    run(Command::new("chmod").arg("755").arg(&to))?;
    if let Some(own) = &guest.own {
        let boot = root.join("boot");
        fs::create_dir_all(&boot).map_err(|error| error.to_string())?;
        for kernel in &guest.kernels {
            let initrd = guest.initrd(kernel, dir)?;
            let config = own.join(format!("config-{kernel}"));
            run(Command::new("cp").arg("-t").arg(&boot).arg(guest.image(kernel)).arg(config))?;
            run(Command::new("cp").arg(initrd).arg(boot.join(format!("initrd.img-{kernel}"))))?;
        }
    }
    let disk = dir.join("tool.ext4");
    run(Command::new("mke2fs").args(["-q", "-t", "ext4", "-F", "-d"]).arg(dir.join("tool")).arg(&disk).arg("160M"))?;
    Ok(disk)
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    let emulator_output = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{program}: {emulator_output}")) }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.console());
        }
        // it has nothing to save
        self.emulator.signal(rustix::process::Signal::KILL);
        let _ = self.emulator.end();
    }
}
