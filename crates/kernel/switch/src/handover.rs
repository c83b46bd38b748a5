//! Memory that this kernel hands over to the next one (kexec handover, live update): one file in memory, a loop device
//! on it, and a file system on that, with the images. Everything above the mount is as on a disk. The memory is lost in
//! any boot except the tool's kexec.

use crate::config::Config;
use crate::region::mounted_at;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use stillpoint_host::file::read_regular_text;
use stillpoint_host::kernel_files;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::{Error, ErrorContext};
use stillpoint_kernel_sys::handover::{DEVICE, Device, Session, memory, preserve, retrieve};

/// Name of the session in both kernels.
const SESSION_NAME: &str = "stillpoint-switch";
const FILE_SYSTEM: &str = "ext4";
/// Mount options; inode tables that are filled later would cause writes all the time.
const MOUNT_OPTIONS: &str = "noatime,noinit_itable";
/// Bytes for criu's images and the file system's own data, beside the memory of programs.
const EXTRA_BYTES: u64 = 64 << 20;
/// Bytes of RAM that are left to everything else.
const RAM_BYTES_LEFT_MIN: u64 = 128 << 20;
const ALIGN: u64 = 1 << 20;
/// Limit in bytes for the list of options that a kernel was built with.
pub(crate) const CONFIGURATION_MAX: u64 = 16 << 20;

/// Options that a kernel must be built with to hand memory over or to take it.
const REQUIRED_OPTIONS: [&str; 3] = ["CONFIG_KEXEC_HANDOVER", "CONFIG_LIVEUPDATE", "CONFIG_LIVEUPDATE_MEMFD"];
/// Options for a file system on it.
const REQUIRED_DRIVERS: [&str; 2] = ["CONFIG_BLK_DEV_LOOP", "CONFIG_EXT4_FS"];
/// Arguments of the kernel command line, with the option that makes each the default; the second one is off by default
/// in every kernel.
const REQUIRED_ARGUMENTS: [(&str, Option<&str>); 2] =
    [("kho", Some("CONFIG_KEXEC_HANDOVER_ENABLE_DEFAULT")), ("liveupdate", None)];

/// Memory that is handed over, and the mount point of the file system on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handover {
    /// Length in bytes.
    pub bytes: u64,
    /// Mount point, on both kernels.
    pub at: PathBuf,
}

/// Handed-over memory that is mounted on this kernel.
#[derive(Debug)]
pub(crate) struct MountedHandover {
    memory: File,
    session: Option<Session>,
}

impl MountedHandover {
    /// Hands it over to the next kernel when this process starts it by kexec.
    pub(crate) fn preserve(&mut self) -> Result<(), Error> {
        self.session = Some(preserve(SESSION_NAME, &self.memory).with_action("hand memory over to the next kernel")?);
        Ok(())
    }
}

impl Handover {
    /// Returns what a switch from this kernel would hand over for images of `needed` bytes, or all obstacles. `lines`
    /// are the command lines of this kernel and the next one.
    pub(crate) fn of(
        config: &Config,
        needed: u64,
        (from, to): (&str, &str),
        (running, next): (&str, &str),
    ) -> Result<Self, Vec<String>> {
        let built =
            |version: &str| read_regular_text(&config.boot.join(format!("config-{version}")), CONFIGURATION_MAX).ok();
        let mut refused = Vec::new();
        // the build options explain a missing device, and are not needed if it exists
        if !Path::new(DEVICE).exists() {
            let own = built(from).or_else(running_config);
            let why = missing_requirement(own.as_deref(), running).unwrap_or_else(|| format!("it has no {DEVICE}"));
            refused.push(format!("{from}, which runs, cannot hand memory over: {why}"));
        }
        let other = built(to);
        let why = match &other {
            Some(text) => missing_requirement(Some(text), next),
            None => Some(format!(
                "{} does not exist, so its options are unknown",
                config.boot.join(format!("config-{to}")).display()
            )),
        };
        refused.extend(why.map(|why| format!("{to} cannot take memory over: {why}")));
        if !["/usr/sbin", "/sbin"].iter().any(|dir| Path::new(dir).join("mke2fs").exists()) {
            refused.push("mke2fs is missing: install e2fsprogs".into());
        }
        let bytes = handover_bytes(needed);
        match available_bytes() {
            Some(free) if free < bytes + RAM_BYTES_LEFT_MIN => refused.push(format!(
                "{} MiB of memory are free: the images that are handed over need {}, and {} must remain free",
                free >> 20,
                bytes >> 20,
                RAM_BYTES_LEFT_MIN >> 20
            )),
            _ => {}
        }
        if !refused.is_empty() {
            return Err(refused);
        }
        let at = config.handover().unwrap_or_else(|| config.state.clone());
        Ok(Handover { bytes, at })
    }

    /// Returns a warning for the operator before a change of the kernel.
    pub(crate) fn warning(&self) -> String {
        format!(
            "images are located in {} MiB of memory that is handed over: the kernel that this one starts by kexec \
             receives it, and no other; after a panic, a hang or a loss of power in the switch, units start from their \
             files and connections are lost",
            self.bytes >> 20
        )
    }

    /// Makes and mounts it, and has it handed over when this process starts the next kernel. All of it is allocated on
    /// return.
    pub(crate) fn create(&self) -> Result<MountedHandover, Error> {
        unmount(&self.at)?;
        let memory = memory(self.bytes).with_action("allocate memory for the images")?;
        let device = device(&memory)?;
        let path = device.path.to_string_lossy().into_owned();
        let file_system =
            ["-q", "-F", "-t", FILE_SYSTEM, "-b", "4096", "-m", "0", "-O", "^has_journal", "-N", "4096", &path];
        run("make a file system for the images", "mke2fs", &file_system, None)?;
        self.mount(&device)?;
        let mut mounted = MountedHandover { memory, session: None };
        match mounted.preserve() {
            Ok(()) => Ok(mounted),
            Err(error) => {
                unmount(&self.at)?;
                Err(error)
            }
        }
    }

    /// Takes it over from the previous kernel, and mounts it at the same place.
    pub(crate) fn take_over(&self) -> Result<MountedHandover, Error> {
        let taken = retrieve(SESSION_NAME).with_action("take memory over from the previous kernel")?;
        let Some(memory) = taken else {
            let why = "this kernel was not started by a kexec that hands memory over".into();
            return Err(Error::Step { what: "find the memory of the images", why });
        };
        self.mount(&device(&memory)?)?;
        Ok(MountedHandover { memory, session: None })
    }

    fn mount(&self, device: &Device) -> Result<(), Error> {
        device.disable_discard().at("prepare", &device.path)?;
        Directory::make(&self.at)?;
        let arguments =
            ["-t", FILE_SYSTEM, "-o", MOUNT_OPTIONS, &device.path.to_string_lossy(), &self.at.to_string_lossy()];
        run("mount the memory of the images", "mount", &arguments, None).map(|_| ())
    }

    /// Releases it, as soon as no process uses it any more.
    pub(crate) fn unmount(&self) {
        if let Err(error) = unmount(&self.at) {
            tracing::warn!("the images' memory remains in use: {error}");
        }
    }
}

fn device(memory: &File) -> Result<Device, Error> {
    // if the driver is built in it cannot be loaded
    let _ = run("load the driver of loop devices", "modprobe", &["loop"], None);
    Device::on(memory).with_action("make a block device of memory")
}

fn unmount(at: &Path) -> Result<(), Error> {
    let path = "/proc/self/mountinfo";
    if mounted_at(&kernel_files::text(path).at("read", path)?, at).as_deref() == Some(at) {
        run("unmount the images' memory", "umount", &["--lazy", &at.to_string_lossy()], None)?;
    }
    Ok(())
}

/// Returns the bytes of memory for images of `needed` bytes: they grow until the freeze, and a file system takes some.
fn handover_bytes(needed: u64) -> u64 {
    (needed + needed / 4 + EXTRA_BYTES).next_multiple_of(ALIGN)
}

/// Returns the bytes of memory that are available without taking them from other processes.
pub(crate) fn available_bytes() -> Option<u64> {
    <procfs::Meminfo as procfs::Current>::current().ok()?.mem_available
}

/// Returns the build options of the running kernel, if it shows them itself.
fn running_config() -> Option<String> {
    run("read the build options of this kernel", "gzip", &["-dc", "/proc/config.gz"], None).ok()
}

/// Returns true if a kernel was built with an option, or if its configuration is unknown.
pub(crate) fn has_option(config: Option<&str>, option: &str) -> bool {
    config.is_none_or(|text| text.lines().any(|line| line == format!("{option}=y") || line == format!("{option}=m")))
}

/// Returns what a kernel with this configuration and command line lacks to hand memory over or to take it.
fn missing_requirement(config: Option<&str>, line: &str) -> Option<String> {
    let has = |option: &str| has_option(config, option);
    if let Some(option) = REQUIRED_OPTIONS.into_iter().chain(REQUIRED_DRIVERS).find(|option| !has(option)) {
        return Some(format!("it was built without {option}"));
    }
    let argument = |name: &str| {
        let mut values = line.split_whitespace().filter_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        values.next_back().map(|value| matches!(value, "on" | "1" | "y" | "Y" | "yes" | "t" | "true"))
    };
    let is_off = |(name, default): &(&str, Option<&str>)| {
        !argument(name).unwrap_or_else(|| default.is_some_and(|option| config.is_some() && has(option)))
    };
    REQUIRED_ARGUMENTS.into_iter().find(is_off).map(|(name, _)| format!("its command line has no {name}=on"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const CONFIG: &str = "CONFIG_KEXEC_HANDOVER=y\nCONFIG_LIVEUPDATE=y\nCONFIG_LIVEUPDATE_MEMFD=y\nCONFIG_BLK_DEV_LOOP=m\n\
                          CONFIG_EXT4_FS=y\n# CONFIG_KEXEC_HANDOVER_ENABLE_DEFAULT is not set\n";

    #[test]
    fn what_a_kernel_lacks_is_named() {
        let why = |config: &str, line: &str| missing_requirement(Some(config), line);
        assert_eq!(why(CONFIG, "quiet kho=on liveupdate=1"), None);
        assert_eq!(why(CONFIG, "quiet liveupdate=on").unwrap(), "its command line has no kho=on");
        assert_eq!(why(CONFIG, "kho=on kho=off liveupdate=on").unwrap(), "its command line has no kho=on");
        assert_eq!(why(CONFIG, "kho=on").unwrap(), "its command line has no liveupdate=on");
        let default = CONFIG
            .replace("# CONFIG_KEXEC_HANDOVER_ENABLE_DEFAULT is not set", "CONFIG_KEXEC_HANDOVER_ENABLE_DEFAULT=y");
        assert_eq!(why(&default, "liveupdate=on"), None);
        assert!(why(&default, "kho=off liveupdate=on").is_some());
        let debian = CONFIG.replace("CONFIG_KEXEC_HANDOVER=y", "# CONFIG_KEXEC_HANDOVER is not set");
        assert_eq!(why(&debian, "kho=on liveupdate=on").unwrap(), "it was built without CONFIG_KEXEC_HANDOVER");
        // without the build options the command line decides
        assert_eq!(missing_requirement(None, "kho=on").unwrap(), "its command line has no liveupdate=on");
    }

    #[test]
    fn there_is_room_for_more_than_is_needed_now() {
        assert_eq!(handover_bytes(0), EXTRA_BYTES);
        assert_eq!(handover_bytes((100 << 20) + 1), (125 << 20) + EXTRA_BYTES + ALIGN);
    }

    #[test]
    fn a_kernel_that_hands_nothing_over_is_refused_by_name() {
        let boot = tempfile::tempdir().unwrap();
        fs::write(boot.path().join("config-7.2-b"), CONFIG).unwrap();
        let config = Config { boot: boot.path().into(), ..Config::default() };
        let refused = |to: &str, lines| Handover::of(&config, 0, ("7.2-a", to), lines).unwrap_err().join("\n");
        let all = refused("7.2-b", ("quiet", "kho=on liveupdate=on"));
        assert!(all.contains("7.2-a, which runs, cannot hand memory over") && !all.contains("7.2-b takes"), "{all}");
        assert!(
            refused("7.2-b", ("", "quiet")).contains("7.2-b cannot take memory over: its command line has no kho=on")
        );
        assert!(refused("7.2-c", ("", "")).contains("config-7.2-c does not exist, so its options are unknown"));
    }
}
