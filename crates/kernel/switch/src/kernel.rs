//! Kernels that are installed: loading one for kexec, and starting it.

use crate::command_line;
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use stillpoint_host::file::{open_regular, read_regular};
use stillpoint_host::kernel_files;
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::{Error, ErrorContext};

/// Limit in bytes for a kernel, or an initramfs.
pub(crate) const IMAGE_BYTES_MAX: u64 = 2 << 30;

/// Data that the next kernel is loaded with.
pub(crate) struct CrashKernelImage {
    pub(crate) mib: u64,
    /// Bytes after its initramfs.
    pub(crate) archive: Vec<u8>,
}

/// An installed kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    pub(crate) initrd: PathBuf,
}

impl Kernel {
    /// Finds it by its version, at Debian's path.
    pub(crate) fn find(boot: &Path, version: &str) -> Result<Self, String> {
        let (image, initrd) = (boot.join(format!("vmlinuz-{version}")), boot.join(format!("initrd.img-{version}")));
        for file in [&image, &initrd] {
            if !file.is_file() {
                return Err(format!("{} does not exist", file.display()));
            }
        }
        check_kernel_file(&image)?;
        Ok(Kernel { version: version.to_owned(), image, initrd })
    }

    /// Loads it into memory, for kexec. A kernel that was loaded before is replaced. The driver of a watchdog that is
    /// to run on is not loaded there, and a crash kernel is loaded first.
    pub(crate) fn load(
        &self,
        append: &str,
        watchdog: Option<&str>,
        crash: Option<&CrashKernelImage>,
    ) -> Result<(), Error> {
        let line = command_line::next_kernel(&command_line::running()?, append, watchdog, crash.map(|crash| crash.mib));
        let line = format!("--command-line={line}");
        let initramfs = crash.map(|crash| self.initramfs_with(&crash.archive)).transpose()?;
        let initrd = match &initramfs {
            Some(file) => format!("--initrd=/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()),
            None => format!("--initrd={}", self.initrd.display()),
        };
        let image = self.image.to_string_lossy().into_owned();
        run("load the kernel", "kexec", &["-s", "-l", &image, &initrd, &line], None).map(|_| ())
    }

    /// Returns its initramfs with an archive after it, in memory.
    fn initramfs_with(&self, archive: &[u8]) -> Result<File, Error> {
        let mut bytes = read_regular(&self.initrd, IMAGE_BYTES_MAX)?;
        // the next archive must be aligned like this
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let file = rustix::fs::memfd_create("initrd", MemfdFlags::CLOEXEC);
        let mut file = File::from(file.map_err(io::Error::from).with_action("allocate memory for an initramfs")?);
        file.write_all(&bytes).and_then(|()| file.write_all(archive)).with_action("assemble an initramfs")?;
        // the kernel loads only a file that no process has open for writing
        kernel_files::open(format!("/proc/self/fd/{}", file.as_raw_fd())).with_action("assemble an initramfs")
    }

    /// Unloads it from memory.
    pub(crate) fn unload() -> Result<(), Error> {
        run("unload the kernel", "kexec", &["-s", "-u"], None).map(|_| ())
    }
}

/// Refuses files that are not kernels, or are cut off: the system call accepts them, and the machine hangs after the
/// kexec. Linux's boot protocol for x86 defines the sizes.
fn check_kernel_file(image: &Path) -> Result<(), String> {
    let failed =
        |why: &dyn std::fmt::Display| format!("{} is not a kernel that can be started: {why}", image.display());
    let file = open_regular(image).map_err(|error| failed(&error))?;
    let length = file.metadata().map_err(|error| failed(&error))?.len();
    let mut header = [0; 0x206];
    file.read_exact_at(&mut header, 0).map_err(|error| failed(&error))?;
    if &header[0x202..] != b"HdrS" {
        return Err(failed(&"it has no header"));
    }
    // in an old kernel 0 means 4
    let setup = if header[0x1f1] == 0 { 4 } else { u64::from(header[0x1f1]) };
    let paragraphs = u32::from_le_bytes([header[0x1f4], header[0x1f5], header[0x1f6], header[0x1f7]]);
    let needed = (setup + 1) * 512 + u64::from(paragraphs) * 16;
    if length < needed {
        return Err(failed(&format!("it has {length} bytes, and its header requires {needed}")));
    }
    Ok(())
}

/// Starts the loaded kernel by kexec. Returns only on failure.
pub(crate) fn start_loaded_kernel() -> Error {
    match rustix::system::reboot(rustix::system::RebootCommand::Kexec) {
        Ok(()) => {
            Error::Step { what: "start the loaded kernel", why: "the kernel returned from the system call".into() }
        }
        Err(error) => Error::System { action: "start the loaded kernel", source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_kernel_that_is_cut_off_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmlinuz");
        let mut image = vec![0; 5 * 512 + 32 * 16];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x1f4] = 32;
        fs::write(&path, &image).unwrap();
        check_kernel_file(&path).unwrap();
        fs::write(&path, &image[..image.len() - 1]).unwrap();
        assert!(check_kernel_file(&path).unwrap_err().contains("it has 3071 bytes, and its header requires 3072"));
        image[0x202] = 0;
        fs::write(&path, &image).unwrap();
        assert!(check_kernel_file(&path).unwrap_err().contains("it has no header"));
    }
}
