//! Memory that one kernel hands over to the next one (`/dev/liveupdate`), and a block device on it (`loop(4)`).
//!
//! **The caller must** be root, hold the [`Session`] until the kexec, and start the next kernel itself
//! (`reboot(LINUX_REBOOT_CMD_KEXEC)`). After [`preserve`] the memory cannot change its length, nor get holes; it can be
//! written until the kexec.
//!
//! **Guaranteed:** a session that is dropped hands nothing over. Memory that was taken belongs to this kernel alone; to
//! hand it over a second time, the caller must keep it again.
//!
//! **It does not** check that the next kernel supports the handover: a kernel without support starts without the
//! memory.
//!
//! ```
//! use std::os::unix::fs::FileExt;
//! let memory = stillpoint_kernel_sys::handover::memory(1 << 20).unwrap();
//! memory.write_all_at(b"x", (1 << 20) - 1).unwrap();
//! ```
//!
//! Follows `include/uapi/linux/liveupdate.h` and `drivers/block/loop.c` of Linux 7.2.

use linux_raw_sys::loop_device::{LO_FLAGS_AUTOCLEAR, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, loop_config};
use rustix::fs::MemfdFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

/// Device file of a kernel that can hand memory over; one program at a time may have it open.
pub const DEVICE: &str = "/dev/liveupdate";

// Numbers of ioctl(2), without a size.
const CREATE_SESSION: u32 = 0xba00;
const RETRIEVE_SESSION: u32 = 0xba01;
const PRESERVE: u32 = 0xba40;
const RETRIEVE: u32 = 0xba41;
const FINISH: u32 = 0xba42;
/// Token of the single file in a session.
const TOKEN: u64 = 0;
/// Number of attempts: another process may take a free loop device.
const LOOP_DEVICE_ATTEMPTS_MAX: usize = 16;

/// A session by its name, which ends with a zero byte.
#[repr(C)]
struct SessionName {
    size: u32,
    fd: i32,
    name: [u8; 64],
}

/// A file in a session.
#[repr(C)]
struct PreservedFile {
    size: u32,
    fd: i32,
    token: u64,
}

#[repr(C)]
struct Finish {
    size: u32,
    reserved: u32,
}

/// Memory that is handed over when this kernel starts the next one by kexec.
#[derive(Debug)]
pub struct Session(#[expect(dead_code, reason = "closing it is what ends it")] OwnedFd);

/// Makes a file in memory of this length; all of it reads as zeros, and nothing is allocated yet.
///
/// # Errors
/// The kernel makes no file in memory of this length.
pub fn memory(bytes: u64) -> Result<File> {
    let memory = File::from(rustix::fs::memfd_create("stillpoint-images", MemfdFlags::CLOEXEC)?);
    memory.set_len(bytes)?;
    Ok(memory)
}

/// Hands memory over under a name, of 63 bytes at most. All of it is allocated on return.
///
/// # Errors
/// The kernel cannot hand memory over, the name is too long or in use, or memory is short.
pub fn preserve(name: &str, memory: &File) -> Result<Session> {
    let session = session(CREATE_SESSION, name)?;
    let mut kept = PreservedFile { size: size::<PreservedFile>(), fd: memory.as_raw_fd(), token: TOKEN };
    call(&session, PRESERVE, &mut kept)?;
    Ok(Session(session))
}

/// Takes the memory that the previous kernel handed over under a name; `None` if there was none.
///
/// # Errors
/// The kernel cannot take memory over, or the name is too long.
pub fn retrieve(name: &str) -> Result<Option<File>> {
    let session = match session(RETRIEVE_SESSION, name) {
        Ok(session) => session,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut kept = PreservedFile { size: size::<PreservedFile>(), fd: -1, token: TOKEN };
    call(&session, RETRIEVE, &mut kept)?;
    // SAFETY: the kernel has just opened it for us, and no other code knows its number.
    let memory = File::from(unsafe { OwnedFd::from_raw_fd(kept.fd) });
    call(&session, FINISH, &mut Finish { size: size::<Finish>(), reserved: 0 })?;
    Ok(Some(memory))
}

fn session(request: u32, name: &str) -> Result<OwnedFd> {
    let mut named = SessionName { size: size::<SessionName>(), fd: -1, name: [0; 64] };
    match named.name.get_mut(..name.len()) {
        Some(place) if name.len() < 64 => place.copy_from_slice(name.as_bytes()),
        _ => return Err(ErrorKind::InvalidInput.into()),
    }
    call(&OpenOptions::new().read(true).write(true).open(DEVICE)?, request, &mut named)?;
    // SAFETY: as in `take`.
    Ok(unsafe { OwnedFd::from_raw_fd(named.fd) })
}

fn size<T>() -> u32 {
    size_of::<T>() as u32
}

fn call<T>(file: &impl AsRawFd, request: u32, argument: &mut T) -> Result<()> {
    // SAFETY: every caller passes the structure that the kernel's header gives for its request, by exclusive reference,
    // and its length in it. A descriptor of another kind returns an error.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(request), std::ptr::from_mut(argument)) };
    if done < 0 { Err(Error::last_os_error()) } else { Ok(()) }
}

/// A block device on memory. It is removed when no process uses it any more and this is closed.
#[derive(Debug)]
pub struct Device {
    /// Path of its device file.
    pub path: PathBuf,
    file: File,
}

impl Device {
    /// Makes a device on all of a file.
    ///
    /// # Errors
    /// There is no loop device, or it refuses the file.
    pub fn on(memory: &File) -> Result<Device> {
        let open = |path: &str, write| OpenOptions::new().read(true).write(write).open(path);
        let control = open("/dev/loop-control", true)?;
        for _ in 0..LOOP_DEVICE_ATTEMPTS_MAX {
            // SAFETY: this request has no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), libc::c_ulong::from(LOOP_CTL_GET_FREE)) };
            if number < 0 {
                return Err(Error::last_os_error());
            }
            let path = format!("/dev/loop{number}");
            let writable = open(&path, true)?;
            // SAFETY: numbers and arrays of numbers, for which zeros are valid values.
            let mut config: loop_config = unsafe { std::mem::zeroed() };
            config.fd = memory.as_raw_fd() as u32;
            config.block_size = 4096;
            config.info.lo_flags = LO_FLAGS_AUTOCLEAR as u32;
            match call(&writable, LOOP_CONFIGURE, &mut config) {
                // some kernels mount no device that another process can write (CONFIG_BLK_DEV_WRITE_MOUNTED)
                Ok(()) => return Ok(Device { file: open(&path, false)?, path: path.into() }),
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::ResourceBusy.into())
    }

    /// Stops the release of blocks that a file system on it no longer uses; zeros are written instead: memory that is
    /// kept refuses holes.
    ///
    /// # Errors
    /// The kernel has no such setting for the device.
    pub fn disable_discard(&self) -> Result<()> {
        self.file.sync_all()?;
        let name = self.path.file_name().unwrap_or_default();
        fs::write(PathBuf::from("/sys/class/block").join(name).join("queue/discard_max_bytes"), "0")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn structures_are_as_long_as_the_kernel_s() {
        assert_eq!((size::<SessionName>(), size::<PreservedFile>(), size::<Finish>()), (72, 16, 8));
    }

    #[test]
    fn a_name_that_is_too_long_is_refused() {
        let memory = memory(4096).unwrap();
        assert_eq!(preserve(&"x".repeat(64), &memory).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn what_is_written_to_a_device_is_in_its_memory() {
        let memory = memory(1 << 20).unwrap();
        let device = match Device::on(&memory) {
            Ok(device) => device,
            Err(error) => stillpoint_testing::skip!("no loop device here: {error}"),
        };
        device.disable_discard().unwrap();
        let writable = OpenOptions::new().write(true).open(&device.path).unwrap();
        writable.write_all_at(&[7; 4096], 8192).unwrap();
        writable.sync_all().unwrap();
        let mut page = [0; 4096];
        memory.read_exact_at(&mut page, 8192).unwrap();
        assert_eq!(page, [7; 4096]);
        let limit = format!("/sys/class/block/{}/queue/discard_max_bytes", device.path.file_name().unwrap().display());
        assert_eq!(fs::read_to_string(limit).unwrap().trim(), "0");
    }
}
