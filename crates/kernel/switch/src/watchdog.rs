//! The hardware watchdog that resets the machine when a kernel hangs. It is armed before the kexec and runs on; on the
//! other side a process must stop it, so the new kernel does not load its driver until the restore begins.

use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_host::file::read_regular;
use stillpoint_host::kernel_files::{self, Files};
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::{Error, ErrorContext};

const CLASS_DIRECTORY: &str = "/sys/class/watchdog";
const MODULES_DIRECTORY: &str = "/sys/module";
/// Parameter that makes all drivers leave it running when the kernel ends.
const STOP_ON_REBOOT_FILE: &str = "/sys/module/watchdog/parameters/stop_on_reboot";
/// Limit in bytes for a kernel's list of modules.
const MODULE_LIST_BYTES_MAX: u64 = 64 << 20;
/// Time within which a driver must be ready.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);

/// A watchdog that watches a switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watchdog {
    /// Name of its driver, a module.
    pub driver: String,
    /// Seconds after its last keepalive until the machine is reset.
    pub limit_s: u32,
}

/// Attributes of a watchdog that can be read without opening it, which would start it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Attributes {
    /// The module that drives it; `None` for a software watchdog of the kernel itself.
    driver: Option<String>,
    nowayout: bool,
    active: bool,
    /// 0 leaves it running during a kexec.
    stop_on_reboot: String,
    /// Lists of modules of the next kernel: those in files of their own, and those built in.
    modules: String,
    builtin: String,
}

/// Returns the watchdog behind a device file, or the reason why it cannot end a hang of the next kernel.
pub(crate) fn usable(device: &Path, limit_s: u32, next: &str) -> Result<Watchdog, String> {
    let name = device.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let class = Path::new(CLASS_DIRECTORY).join(&name);
    if name.is_empty() || !class.exists() {
        return Err(format!("there is no watchdog {}", device.display()));
    }
    let modules = Path::new("/lib/modules").join(next);
    let list = |name: &str| {
        let bytes = read_regular(&modules.join(name), MODULE_LIST_BYTES_MAX).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let files = Files::of_kernel();
    let attributes = Attributes {
        driver: driver_of(&files, &class),
        nowayout: files.value(class.join("nowayout")) == "1",
        active: files.value(class.join("state")) == "active",
        stop_on_reboot: files.value(STOP_ON_REBOOT_FILE),
        modules: list("modules.dep"),
        builtin: list("modules.builtin"),
    };
    check_usable(&attributes)
        .map(|driver| Watchdog { driver, limit_s })
        .map_err(|why| format!("{}: {why}", device.display()))
}

fn check_usable(attributes: &Attributes) -> Result<String, String> {
    let Some(driver) = &attributes.driver else {
        return Err("it is not hardware whose driver is a module: it ends with this kernel".into());
    };
    let has = |list: &str| list.lines().any(|line| line.split(':').next().is_some_and(|path| is_module(path, driver)));
    if attributes.active {
        return Err("it is in use (RuntimeWatchdogSec= of systemd, or a daemon)".into());
    }
    if attributes.nowayout {
        return Err("it cannot be stopped (nowayout)".into());
    }
    if attributes.stop_on_reboot != "0" {
        return Err("the kexec would stop it: this kernel's command line must have watchdog.stop_on_reboot=0".into());
    }
    if has(&attributes.builtin) {
        return Err(format!("its driver {driver} is built into the next kernel, which would stop it at once"));
    }
    if !has(&attributes.modules) {
        return Err(format!("the next kernel has no {driver}: it could not be stopped there"));
    }
    Ok(driver.clone())
}

/// Returns true if a path like `kernel/drivers/watchdog/x_y.ko.xz` is the module `x_y`, whose file may be called `x-y`.
fn is_module(path: &str, name: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split_once(".ko").is_some_and(|(file, _)| file.replace('-', "_") == name)
}

/// Returns the module behind a watchdog. Some drivers (i6300esb) do not register their device with the kernel: those
/// are found by the name that watchdog and driver have in common. A software watchdog of the kernel has no driver of
/// any bus.
fn driver_of(files: &Files, class: &Path) -> Option<String> {
    if let Ok(module) = files.canonical(class.join("device/driver/module")) {
        return module.file_name().map(|name| name.to_string_lossy().into_owned());
    }
    let identity = files.text(class.join("identity")).ok()?;
    let modules = Path::new(MODULES_DIRECTORY);
    let drives = |module: &OsString| {
        let drivers = files.names(modules.join(module).join("drivers"));
        // BUS:NAME
        drivers.iter().any(|driver| driver.to_string_lossy().split_once(':').is_some_and(|it| it.1 == identity.trim()))
    };
    files.names(modules).into_iter().find(drives).map(|module| module.to_string_lossy().into_owned())
}

/// A watchdog that runs. If it is dropped, it runs on and resets the machine at its limit.
pub(crate) struct Armed {
    device: File,
}

impl Armed {
    fn start(device: &Path, limit_s: u32) -> Result<Self, Error> {
        let path = device.to_string_lossy();
        run("set the watchdog's limit", "wdctl", &["--settimeout", &limit_s.to_string(), &path], None)?;
        kernel_files::device(device, rustix::fs::OFlags::WRONLY).at("start", device).map(|device| Armed { device })
    }

    fn ping(&mut self) -> std::io::Result<()> {
        self.device.write_all(b".")
    }

    /// Stops the watchdog.
    pub(crate) fn disarm(mut self) -> Result<(), Error> {
        self.device.write_all(b"V").with_action("stop the watchdog")
    }
}

impl Watchdog {
    /// Starts the watchdog.
    pub(crate) fn arm(&self) -> Result<Armed, Error> {
        Armed::start(&self.device()?, self.limit_s)
    }

    /// Loads its driver, and starts it or continues if it runs. It is kept from a reset while the process that should
    /// disarm it makes progress: a process without [`Keepalive::report_progress`] for longer than `patience` hangs.
    pub(crate) fn take_over(&self, limit: Duration) -> Result<Keepalive, Error> {
        run("load the watchdog's driver", "modprobe", &[&self.driver], None)?;
        let mut armed = self.arm()?;
        let (stop, stopped) = channel();
        let last_report = Arc::new(Mutex::new(Instant::now()));
        let last_progress = last_report.clone();
        let interval = Duration::from_secs(u64::from(self.limit_s)) / 4;
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                if last_progress.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < limit
                    && let Err(error) = armed.ping()
                {
                    tracing::error!("the watchdog does not accept a keepalive: {error}");
                }
            }
            armed
        });
        Ok(Keepalive { stop, last_report, thread })
    }

    /// Returns its device file on this kernel, once it exists.
    fn device(&self) -> Result<PathBuf, Error> {
        let (end, files) = (Instant::now() + DEVICE_TIMEOUT, Files::of_kernel());
        loop {
            let drives = |name: &OsString| {
                driver_of(&files, &Path::new(CLASS_DIRECTORY).join(name)).as_ref() == Some(&self.driver)
            };
            let device = files.names(CLASS_DIRECTORY).into_iter().find(drives).map(|name| Path::new("/dev").join(name));
            match device.filter(|device| device.exists()) {
                Some(device) => return Ok(device),
                None if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
                None => {
                    let why = format!("driver {} provides none", self.driver);
                    return Err(Error::Step { what: "find the watchdog", why });
                }
            }
        }
    }
}

/// A watchdog that runs and gets keepalives.
pub(crate) struct Keepalive {
    stop: Sender<()>,
    last_report: Arc<Mutex<Instant>>,
    thread: std::thread::JoinHandle<Armed>,
}

impl Keepalive {
    /// Reports progress of the process that should disarm it.
    pub(crate) fn report_progress(&self) {
        *self.last_report.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Stops the watchdog.
    pub(crate) fn disarm(self) -> Result<(), Error> {
        drop(self.stop);
        match self.thread.join() {
            Ok(armed) => armed.disarm(),
            Err(_) => Err(Error::Step {
                what: "stop the watchdog",
                why: "the thread that sends its keepalives panicked".into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_is_used_when_it_survives_the_jump_and_can_be_stopped_after_it() {
        let good = Attributes {
            driver: Some("iTCO_wdt".into()),
            nowayout: false,
            active: false,
            stop_on_reboot: "0".into(),
            modules: "kernel/drivers/watchdog/iTCO_wdt.ko.xz: kernel/drivers/mfd/lpc_ich.ko.xz\n".into(),
            builtin: "kernel/fs/ext4/ext4.ko\n".into(),
        };
        assert_eq!(check_usable(&good), Ok("iTCO_wdt".into()));
        let builtin = "kernel/drivers/watchdog/iTCO-wdt.ko\n".to_owned();
        for (attributes, why) in [
            (Attributes { driver: None, ..good.clone() }, "ends with this kernel"),
            (Attributes { nowayout: true, ..good.clone() }, "nowayout"),
            (Attributes { active: true, ..good.clone() }, "in use"),
            (Attributes { stop_on_reboot: "-1".into(), ..good.clone() }, "watchdog.stop_on_reboot=0"),
            (Attributes { builtin, ..good.clone() }, "built into the next kernel"),
            (Attributes { modules: String::new(), ..good }, "the next kernel has no iTCO_wdt"),
        ] {
            assert!(check_usable(&attributes).unwrap_err().contains(why), "{why}");
        }
        assert!(usable(Path::new("/dev/no-such-watchdog"), 60, "6.99").unwrap_err().contains("there is no watchdog"));
    }

    #[test]
    fn a_driver_is_known_by_its_device_or_by_its_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let of = |name: &str| dir.path().join("sys").join(name);
        for path in ["module/e1000/drivers/pci:e1000", "module/i6300esb/drivers/pci:i6300ESB timer", "module/softdog"] {
            std::fs::create_dir_all(of(path)).expect("make it");
        }
        let watchdog = |name: &str, identity: &str| {
            std::fs::create_dir_all(of(name)).expect("make it");
            std::fs::write(of(name).join("identity"), format!("{identity}\n")).expect("write it");
        };
        watchdog("watchdog0", "i6300ESB timer");
        watchdog("watchdog1", "Software Watchdog");
        watchdog("watchdog2", "iTCO_wdt");
        std::fs::create_dir_all(of("watchdog2/device/driver")).expect("make it");
        std::fs::create_dir_all(of("module/iTCO_wdt")).expect("make it");
        std::os::unix::fs::symlink(of("module/iTCO_wdt"), of("watchdog2/device/driver/module")).expect("link it");
        let files = Files::below(dir.path());
        let module = |name: &str| driver_of(&files, &Path::new("/sys").join(name));
        assert_eq!(module("watchdog0").as_deref(), Some("i6300esb"));
        assert_eq!(module("watchdog1"), None);
        assert_eq!(module("watchdog2").as_deref(), Some("iTCO_wdt"));
        assert_eq!(module("watchdog3"), None);
    }

    #[test]
    fn a_module_is_known_by_its_file() {
        assert!(is_module("kernel/drivers/watchdog/i6300esb.ko", "i6300esb"));
        assert!(is_module("kernel/drivers/watchdog/sp5100-tco.ko.zst", "sp5100_tco"));
        assert!(!is_module("kernel/drivers/watchdog/softdog.ko.xz", "i6300esb"));
    }
}
