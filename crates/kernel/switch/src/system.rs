//! The machine around the units: file systems, process ids. Every step has its inverse beside it.

use crate::config::{CONFIG, Config};
use crate::region::{mounted_at, parse_mounts};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::file::{open_mount_point, read_regular_text};
use stillpoint_host::kernel_files::{self, Files};
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::{Error, ErrorContext, MACHINE_KEY, is_memory, nearest_existing};

/// Limit in bytes for `/etc/fstab`.
const FSTAB_BYTES_MAX: u64 = 1 << 20;

/// Resets the machine at once, when no process may run on.
pub(crate) fn reset() -> ! {
    let _ = kernel_files::write("/proc/sysrq-trigger", "b");
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Ends the machine as [`reset`] does: for tests of a loss of power, too.
pub fn reset_machine() {
    reset()
}

/// Returns the mount points of block devices that are writable.
fn writable_mounts(mounts: &str) -> Vec<String> {
    let writable = parse_mounts(mounts).filter(|mount| mount.is_writable && mount.source.starts_with("/dev/"));
    writable.map(|mount| mount.at.to_string_lossy().into_owned()).collect()
}

/// The writable file systems of block devices. They are opened before the data to be synced is written: the kernel
/// reports only errors that occur after the open.
pub(crate) struct Disks(Vec<(String, File)>);

impl Disks {
    pub(crate) fn open() -> Result<Self, Error> {
        Disks::at(writable_now()?)
    }

    fn at(mounts: Vec<String>) -> Result<Self, Error> {
        let open = |at: String| Ok((at.clone(), open_mount_point(Path::new(&at))?));
        mounts.into_iter().map(open).collect::<Result<_, Error>>().map(Disks)
    }

    /// Writes everything to all of them, and to others. `sync` alone does not report that a write failed.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        rustix::fs::sync();
        self.0.iter().try_for_each(|(at, file)| rustix::fs::syncfs(file).at("write to disk", at))
    }
}

/// Returns the mount points that are writable now.
pub(crate) fn writable_now() -> Result<Vec<String>, Error> {
    let path = "/proc/self/mountinfo";
    kernel_files::text(path).at("read", path).map(|mounts| writable_mounts(&mounts))
}

/// Writes everything to disk, and makes the disks read-only: the page cache does not survive a kexec. Returns the mount
/// points.
pub(crate) fn remount_read_only() -> Result<Vec<String>, Error> {
    let mounts = writable_now()?;
    rustix::fs::sync();
    kernel_files::write("/proc/sysrq-trigger", "u").at("write", "/proc/sysrq-trigger")?;
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let left = writable_now()?;
        if left.is_empty() {
            rustix::fs::sync();
            return Ok(mounts);
        }
        if Instant::now() > end {
            remount_writable(&mounts)?;
            return Err(Error::Step {
                what: "remount all file systems read-only",
                why: format!("{} can still be written", left.join(", ")),
            });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Makes them writable again.
pub(crate) fn remount_writable(mounts: &[String]) -> Result<(), Error> {
    mounts
        .iter()
        .try_for_each(|at| run("remount a file system writable", "mount", &["-o", "remount,rw", at], None).map(|_| ()))
}

/// Makes new processes get ids above this one.
pub(crate) fn skip_pids(above: u32) -> Result<(), Error> {
    skip_pids_in(&Files::of_kernel(), above)
}

/// The highest process id that Linux allows.
const HIGHEST_PID: u32 = 4 << 20;
/// Number of ids that must be free above.
const FREE_PIDS: u32 = 1 << 14;

fn skip_pids_in(files: &Files, above: u32) -> Result<(), Error> {
    let (most, last) = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/ns_last_pid");
    let read = |path: &str| files.text(path).at("read", path).map(|text| text.trim().parse().unwrap_or(0));
    // A kernel that has just started has a maximum of 32768 on a small machine; systemd raises it, but later than this
    // is called. No id above the maximum can be used as the last one, and none can be restored.
    if read(most)? < above.saturating_add(FREE_PIDS) {
        files.write(most, HIGHEST_PID.to_string()).at("write", most)?;
    }
    let above = above.min(HIGHEST_PID - 1);
    if read(last)? < above { files.write(last, above.to_string()).at("write", last) } else { Ok(()) }
}

/// Returns the requirements of a switch that this machine does not meet, beside its units.
pub(crate) fn find_missing(config: &Config) -> Vec<String> {
    let mut missing = Vec::new();
    for (program, package) in [("kexec", "kexec-tools"), ("systemctl", "systemd")] {
        let there = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].iter().any(|dir| Path::new(dir).join(program).exists());
        if !there {
            missing.push(format!("{program} is missing: install {package}"));
        }
    }
    if kernel_files::text("/sys/kernel/kexec_loaded").is_err() {
        missing.push("this kernel cannot load another one (CONFIG_KEXEC)".into());
    }
    let line = kernel_files::text("/proc/cmdline").unwrap_or_default();
    if line.split_whitespace().any(|part| part.starts_with("ip=")) {
        missing.push("the kernel command line has ip=: addresses would be active before the guard".into());
    }
    if config.units.is_empty() {
        missing.push("no unit is configured".into());
    }
    let elsewhere = config.images.as_deref().filter(|_| config.handover().is_none());
    let images = elsewhere.map(|images| (images, "images must be on a disk, or in a region of RAM"));
    let key = Path::new(MACHINE_KEY).parent().map(|dir| (dir, "the key that seals images must be on a disk"));
    let state = (config.state.as_path(), "the state must be on a disk");
    for (dir, what) in [state].into_iter().chain(key).chain(images) {
        if is_memory(nearest_existing(dir)) {
            missing.push(format!("{} is located in memory, which does not outlive this kernel: {what}", dir.display()));
        }
    }
    missing.extend(undiscoverable(config));
    missing
}

/// The program that looks for a switch when a kernel starts.
const GENERATOR: &str = "stillpoint-kernel";
/// Directories in which systemd looks for such programs, each below one of these.
const GENERATORS: &str = "systemd/system-generators";
const GENERATOR_ROOTS: [&str; 5] = ["/run", "/etc", "/usr/local/lib", "/usr/lib", "/lib"];

/// Returns the reasons why the next kernel would not find the switch, and start the units from their files, beside
/// their images.
fn undiscoverable(config: &Config) -> Vec<String> {
    let mut undiscoverable = Vec::new();
    if !GENERATOR_ROOTS.iter().any(|root| Path::new(root).join(GENERATORS).join(GENERATOR).exists()) {
        undiscoverable
            .push(format!("{GENERATOR} is in none of systemd's directories for generators: run make install"));
    }
    let state = config.state.display();
    match Config::read(Path::new(CONFIG)) {
        Ok(known) if known.state == config.state => {}
        Ok(known) => {
            let known = known.state.display();
            undiscoverable.push(format!(
                "the state is located in {state}, and the next kernel looks for it in {known}, as {CONFIG} says"
            ));
        }
        Err(error) => undiscoverable.push(error.with_causes()),
    }
    let path = nearest_existing(&config.state);
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mounts = kernel_files::text("/proc/self/mountinfo").unwrap_or_default();
    let fstab = read_regular_text(Path::new("/etc/fstab"), FSTAB_BYTES_MAX).unwrap_or_default();
    if let Some(at) = late_mount(&mounts, &fstab, &path) {
        undiscoverable.push(format!(
            "{state} is located on {}, which is not mounted when the next kernel looks for a switch: keep the state on \
             the root file system (images may be located elsewhere), or add x-initrd.mount in /etc/fstab",
            at.display()
        ));
    }
    undiscoverable
}

/// Returns the mount point of a path's file system, if systemd mounts it and not the initramfs.
fn late_mount(mounts: &str, fstab: &str, path: &Path) -> Option<PathBuf> {
    let at = mounted_at(mounts, path).filter(|at| !["/", "/usr"].map(Path::new).contains(&at.as_path()))?;
    let early = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        matches!(fields[..], [source, target, _, options, ..] if !source.starts_with('#')
            && Path::new(target) == at && options.split(',').any(|option| option == "x-initrd.mount"))
    };
    (!fstab.lines().any(early)).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn ids_above_what_a_new_kernel_gives_are_made_room_for() {
        let dir = tempfile::tempdir().unwrap();
        let settings = dir.path().join("proc/sys/kernel");
        fs::create_dir_all(&settings).unwrap();
        let (most, last) = (settings.join("pid_max"), settings.join("ns_last_pid"));
        let after = |above| {
            fs::write(&most, "32768\n").unwrap();
            fs::write(&last, "700\n").unwrap();
            skip_pids_in(&Files::below(dir.path()), above).unwrap();
            let read = |path: &Path| fs::read_to_string(path).unwrap().trim().parse::<u32>().unwrap();
            (read(&most), read(&last))
        };
        assert_eq!(after(500), (32_768, 700));
        assert_eq!(after(1_000), (32_768, 1_000));
        assert_eq!(after(70_000), (HIGHEST_PID, 70_000));
        assert_eq!(after(u32::MAX), (HIGHEST_PID, HIGHEST_PID - 1));
    }

    #[test]
    fn block_devices_that_can_be_written_are_found() {
        let mounts = "22 1 254:0 / / rw,noatime shared:1 - ext4 /dev/vda rw,errors=continue\n\
                      23 22 0:5 / /proc rw - proc proc rw\n\
                      24 22 254:16 / /opt ro - ext4 /dev/vdb ro\n\
                      25 22 254:32 / /srv ro shared:2 master:1 - xfs /dev/vdc rw,attr2\n";
        assert_eq!(writable_mounts(mounts), ["/", "/srv"]);
        let odd = "26 22 254:48 / /srv/two\\040words rw - ext4 /dev/vdd rw\n";
        assert_eq!(writable_mounts(odd), ["/srv/two words"]);
    }

    #[test]
    fn a_disk_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &Path| Disks::at(vec![path.display().to_string()]).and_then(|disks| disks.sync());
        at(dir.path()).unwrap();
        let gone = dir.path().join("gone");
        assert!(at(&gone).unwrap_err().to_string().contains("gone"));
    }

    #[test]
    fn a_state_that_the_next_kernel_sees_too_late_is_told() {
        let mounts = "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
                      25 22 254:32 / /var rw shared:2 - xfs /dev/vdc rw\n\
                      26 25 254:48 / /var/lib/images rw - xfs /dev/vdd rw\n";
        let late = |fstab: &str, path: &str| late_mount(mounts, fstab, Path::new(path));
        assert_eq!(late("", "/srv/switch"), None);
        assert_eq!(late("", "/var/lib/stillpoint/switch"), Some("/var".into()));
        assert_eq!(late("", "/var/lib/images"), Some("/var/lib/images".into()));
        let fstab = "# /dev/vdc /var xfs x-initrd.mount 0 2\n/dev/vdc /var xfs defaults,nofail 0 2\n";
        assert_eq!(late(fstab, "/var/lib/stillpoint"), Some("/var".into()));
        assert_eq!(late("UUID=1 /var xfs defaults,x-initrd.mount 0 2\n", "/var/lib/stillpoint"), None);
    }
}
