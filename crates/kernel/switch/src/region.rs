//! Memory that outlives a kernel: a region that no kernel uses as RAM (`memmap=SIZE!START`), which the kernel shows as
//! a block device (`/dev/pmem0`), with a file system on it. Its content is lost with the power.

use crate::memmap::check_excluded;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::kernel_files::{self, Files};
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::{Error, ErrorContext, nearest_existing};

/// Time within which the device must appear.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
/// Drivers of the device, if they are not built in.
const DRIVERS: [&str; 2] = ["nd_e820", "nd_pmem"];
/// Prefixes of block devices that are memory and end with this kernel.
const VOLATILE_DEVICES: [&str; 2] = ["ram", "zram"];

/// A region, and the mount of the file system on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Mount point.
    pub at: PathBuf,
    /// Type of the file system.
    pub kind: String,
    /// Mount options.
    pub options: String,
}

/// Mount of a file system.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) at: PathBuf,
    kind: String,
    pub(crate) source: String,
    options: String,
    /// True if its file system can be written.
    pub(crate) is_writable: bool,
}

impl Region {
    /// Returns the region that holds a directory, with the command lines of this kernel and the next one; `None` if
    /// that is a disk. The error is the reason why the directory is lost with this kernel.
    pub(crate) fn of(directory: &Path, running: &str, next: &str) -> Result<Option<Region>, String> {
        let nearest = nearest_existing(directory);
        let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", nearest.display());
        let path = nearest.canonicalize().map_err(|error| failed(&error))?;
        let mounts = kernel_files::text("/proc/self/mountinfo").map_err(|error| failed(&error))?;
        let Some(mount) = mount_of(&mounts, &path).filter(|mount| mount.source.starts_with('/')) else {
            return Ok(None);
        };
        // file systems without a device are identified by their type
        let Ok(device) = Path::new(&mount.source).metadata() else { return Ok(None) };
        let (major, minor) = (rustix::fs::major(device.rdev()), rustix::fs::minor(device.rdev()));
        let files = Files::of_kernel();
        let block = files.canonical(format!("/sys/dev/block/{major}:{minor}"));
        let Some(found) =
            block.ok().map(|block| memory_range(&files, &block)).transpose().map_err(|why| failed(&why))?.flatten()
        else {
            return Ok(None);
        };
        let region = found.0..found.0 + found.1;
        check_excluded(region, running, next).map_err(|why| failed(&why))?;
        let Mount { at, kind, options, .. } = mount;
        Ok(Some(Region { start: found.0, bytes: found.1, at, kind, options }))
    }

    /// Returns the warning for the operator before a change of the kernel.
    pub(crate) fn warning(&self) -> String {
        format!(
            "images are located in memory ({}): they outlive kernels, and resets that do not clear RAM; after a loss \
             of power in the switch, units start from their files and connections are lost",
            self.at.display()
        )
    }

    /// Mounts its file system at the same place as before.
    pub(crate) fn mount(&self) -> Result<(), Error> {
        let path = "/proc/self/mountinfo";
        let is_there = || -> Result<bool, Error> {
            let mounts = kernel_files::text(path).at("read", path)?;
            Ok(mount_of(&mounts, &self.at).is_some_and(|mount| mount.at == self.at))
        };
        if is_there()? {
            return Ok(());
        }
        let device = self.device()?;
        let arguments = ["-t", &self.kind, "-o", &self.options, &device.to_string_lossy(), &self.at.to_string_lossy()];
        match run("mount the memory of the images", "mount", &arguments, None) {
            // another process was faster
            Err(_) if is_there()? => Ok(()),
            done => done.map(|_| ()),
        }
    }

    /// Returns its block device on this kernel, once it exists: numbers may have changed, its address has not.
    fn device(&self) -> Result<PathBuf, Error> {
        let end = Instant::now() + DEVICE_TIMEOUT;
        let mut loaded = false;
        let (files, class) = (Files::of_kernel(), Path::new("/sys/class/block"));
        loop {
            let is_it = |name: &OsString| {
                let block = class.join(name);
                let memory_range =
                    files.canonical(&block).ok().and_then(|block| memory_range(&files, &block).ok().flatten());
                memory_range == Some((self.start, self.bytes)) && !files.exists(block.join("partition"))
            };
            if let Some(block) = files.names(class).into_iter().find(is_it) {
                return Ok(Path::new("/dev").join(block));
            }
            if !loaded {
                loaded = true;
                for driver in DRIVERS {
                    // a built-in driver cannot be loaded
                    let _ = run("load the driver of persistent memory", "modprobe", &[driver], None);
                }
            } else if Instant::now() > end {
                let why = format!("this kernel shows no persistent memory at {:#x}", self.start);
                return Err(Error::Step { what: "find the memory of the images", why });
            } else {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Returns the mount point of the file system that holds a path.
pub(crate) fn mounted_at(mounts: &str, path: &Path) -> Option<PathBuf> {
    mount_of(mounts, path).map(|mount| mount.at)
}

/// Returns the device of the file system that holds a path.
pub(crate) fn mounted_source(mounts: &str, path: &Path) -> Option<PathBuf> {
    mount_of(mounts, path).map(|mount| mount.source.into())
}

/// Returns the mount that holds a path; a later mount covers an earlier one.
/// Parses the mounts of `/proc/self/mountinfo`.
pub(crate) fn parse_mounts(mounts: &str) -> impl Iterator<Item = Mount> {
    let parse = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let (mut before, mut after) = (before.split(' ').skip(4), after.split(' '));
        let (at, own) = (before.next()?, before.next()?);
        let (kind, source, of_all) = (after.next()?, after.next()?, after.next()?);
        // the options of the mount, and those of the file system without repetition
        let rest = of_all.split(',').filter(|option| !["rw", "ro"].contains(option));
        let options = own.split(',').map(|option| if option == "ro" { "rw" } else { option }).chain(rest);
        Some(Mount {
            at: at.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\").into(),
            kind: kind.into(),
            source: source.into(),
            options: options.collect::<Vec<_>>().join(","),
            is_writable: of_all.split(',').next() == Some("rw"),
        })
    };
    mounts.lines().filter_map(parse)
}

fn mount_of(mounts: &str, path: &Path) -> Option<Mount> {
    let on_it = parse_mounts(mounts).filter(|mount| path.starts_with(&mount.at));
    on_it.enumerate().max_by_key(|(number, mount)| (mount.at.components().count(), *number)).map(|(_, mount)| mount)
}

/// Returns first address and length of the RAM behind a block device, by its directory in /sys; `None` for a disk.
/// NVDIMMs and the like count as disks: they need no argument, and do not lose their content with the power.
fn memory_range(files: &Files, block: &Path) -> Result<Option<(u64, u64)>, String> {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let own = name(block);
    if VOLATILE_DEVICES
        .iter()
        .any(|kind| own.strip_prefix(kind).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())))
    {
        return Err(format!("/dev/{own} is located in memory, which does not outlive this kernel"));
    }
    let below = files.names(block.join("slaves"));
    let below: Vec<String> = below.iter().map(|slave| slave.to_string_lossy().into_owned()).collect();
    if below.iter().any(|slave| slave.starts_with("pmem")) {
        return Err(format!(
            "/dev/{own} is located above {}: create the file system directly on that device",
            below.join(", ")
        ));
    }
    let Some(namespace) = block.ancestors().find(|above| name(above).starts_with("namespace")) else { return Ok(None) };
    let bus = namespace.ancestors().find(|above| name(above).starts_with("ndbus"));
    if bus.map(|bus| files.value(bus.join("provider"))).as_deref() != Some("e820") {
        return Ok(None);
    }
    let field_number = |file: &str| super::memmap::parse_number(&files.value(namespace.join(file)));
    match (field_number("resource"), field_number("size")) {
        (Some(start), Some(bytes)) if start > 0 => Ok(Some((start, bytes))),
        _ => Err(format!("/dev/{own}: the kernel does not report where it is located ({})", namespace.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_lies_on_the_last_of_the_nearest_mounts() {
        let mounts = "22 1 254:0 / / rw,noatime shared:1 - ext4 /dev/vda rw,errors=continue\n\
                      25 22 259:0 / /pmem ro,relatime shared:2 - ext4 /dev/pmem0 ro,dax=always\n\
                      26 22 0:33 / /pmem/x rw - tmpfs tmpfs rw,size=4k\n\
                      27 22 259:1 / /pmem rw,noatime - xfs /dev/pmem1 rw,dax=always\n";
        let at = |path: &str| mount_of(mounts, Path::new(path)).map(|mount| (mount.source, mount.options));
        let pmem1 = Some(("/dev/pmem1".to_owned(), "rw,noatime,dax=always".to_owned()));
        assert_eq!(at("/pmem/images"), pmem1);
        assert_eq!(at("/pmemory").unwrap().0, "/dev/vda");
        let first = mounts.lines().nth(1).unwrap();
        let options = mount_of(first, Path::new("/pmem")).unwrap().options;
        assert_eq!(
            options, "rw,relatime,dax=always",
            "one that was made read-only for the jump is to be written again"
        );
    }

    #[test]
    fn regions_are_told_from_disks_and_from_memory_that_passes() {
        let root = tempfile::tempdir().unwrap();
        let kernel = Files::below(root.path());
        let devices = Path::new("/sys/devices");
        let make = |path: &str, files: &[(&str, &str)]| {
            let dir = root.path().join("sys/devices").join(path);
            std::fs::create_dir_all(&dir).unwrap();
            files.iter().for_each(|(name, text)| std::fs::write(dir.join(name), text).unwrap());
            devices.join(path)
        };
        let memory_range = |block: &Path| memory_range(&kernel, block);
        make("e820_pmem/ndbus0", &[("provider", "e820\n")]);
        let namespace = [("resource", "0x40000000\n"), ("size", "268435456\n")];
        make("e820_pmem/ndbus0/region0/namespace0.0", &namespace);
        let found = Ok(Some((1 << 30, 256 << 20)));
        assert_eq!(memory_range(&make("e820_pmem/ndbus0/region0/namespace0.0/block/pmem0", &[])), found);
        assert_eq!(memory_range(&make("e820_pmem/ndbus0/region0/namespace0.0/block/pmem0/pmem0p1", &[])), found);
        make("acpi/ndbus1", &[("provider", "ACPI.NFIT\n")]);
        make("acpi/ndbus1/region0/namespace1.0", &namespace);
        assert_eq!(memory_range(&make("acpi/ndbus1/region0/namespace1.0/block/pmem1", &[])), Ok(None));
        assert_eq!(memory_range(&make("pci/virtio0/block/vda", &[])), Ok(None));
        assert!(memory_range(&make("virtual/block/ram0", &[])).unwrap_err().contains("does not outlive"));
        assert!(memory_range(&make("virtual/block/zram1", &[])).is_err());
        make("virtual/block/dm-0/slaves/pmem0", &[]);
        assert!(memory_range(&devices.join("virtual/block/dm-0")).unwrap_err().contains("is located above pmem0"));
        // a process without root's rights does not get the address
        make("e820_pmem/ndbus0/region1/namespace1.0", &[("resource", "0x0\n"), ("size", "2097152\n")]);
        assert!(
            memory_range(&make("e820_pmem/ndbus0/region1/namespace1.0/block/pmem2", &[]))
                .unwrap_err()
                .contains("does not report")
        );
    }
}
