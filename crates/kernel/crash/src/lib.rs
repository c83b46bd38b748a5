//! Archive for a next kernel, so that its panic returns to this one, without the firmware: it is appended to the
//! initramfs, with a program that the next kernel starts first (`first/main.rs`) and all that this program needs.
//!
//! ```text
//!  next kernel        /stillpoint/first     loads 1 as the crash kernel, with 0 to 4 one after another as its initramfs
//!                     /stillpoint/line      the crash kernel's command line
//!                     /stillpoint/next      what is started then
//!                     /stillpoint/0 .. 4    1 is this kernel, 3 its initramfs
//!  crash kernel       /init                 the same program: loads `kernel`, `initrd` and `rest` as `plan` says, then kexec
//!                     /stillpoint/plan, rest, kernel, initrd
//!  this kernel again  with all of the machine's memory
//! ```
//!
//! A crash kernel knows only its own memory, and passes that on when it loads another kernel in the usual way. So all
//! data for the start of the old kernel is made here, while it still runs: its boot parameters with the machine's map
//! of memory, page tables, and some instructions (`rest`), and each has its place in memory (`plan`).
//!
//! **The caller must** give the boot parameters and the map of memory that the running kernel was started with.
//!
//! **Guaranteed:** nothing is placed in memory that the caller excludes, nor outside of memory.
//!
//! **It does not** load anything: the caller appends the result to an initramfs, and puts [`FIRST_PROGRAM`] on a kernel command
//! line.

#![forbid(unsafe_code)]

mod archive;
mod entry;
mod image;
mod placement;

use archive::Archive;
use std::ops::Range;

/// Path of the program that the next kernel starts first (`rdinit=`).
pub const FIRST_PROGRAM: &str = "/stillpoint/first";
/// Argument of the old kernel with the processor that is not used.
pub const UNUSED_PROCESSOR_ARGUMENT: &str = "disable_cpu_apicid=";
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/first"));
/// Longest kernel command line in bytes.
const COMMAND_LINE_BYTES_MAX: usize = 2047;
/// Bytes that a crash kernel needs beside itself and its data: tables of its memory, and working memory.
const BASE_BYTES: u64 = 64 << 20;
const ALIGN: u64 = 16 << 20;

/// The kernel that a panic returns to.
#[derive(Debug, Clone, Copy)]
pub struct OldKernel<'a> {
    /// Its image (`vmlinuz`).
    pub kernel: &'a [u8],
    /// Initramfs of that kernel (`initrd.img`).
    pub initrd: &'a [u8],
    /// Boot parameters that it was started with (`/sys/kernel/boot_params/data`).
    pub parameters: &'a [u8],
    /// Its kernel command line.
    pub command_line: &'a str,
    /// Memory that must not be changed.
    pub preserved: &'a [Range<u64>],
    /// APIC id of the processor that the firmware starts with, unless that one is not used already.
    pub boot_processor: Option<u32>,
    /// True if it can run without that one. If false, a panic on another processor goes through the firmware.
    pub runs_without_boot_processor: bool,
}

/// Returns the archive to append to the next kernel's initramfs. `crash_line` is the crash kernel's command line,
/// `next` the program that is started after [`FIRST_PROGRAM`].
///
/// # Errors
/// The old kernel or its boot parameters are not understood, a command line is too long, or there is no free RAM.
pub fn archive(old: &OldKernel<'_>, crash_line: &str, next: &str) -> Result<Vec<u8>, String> {
    let image = image::Image::parse(old.kernel)?;
    for command_line in [old.command_line, crash_line] {
        if command_line.len() > COMMAND_LINE_BYTES_MAX {
            return Err(format!(
                "a command line has {} bytes, and kernels accept {COMMAND_LINE_BYTES_MAX}",
                command_line.len()
            ));
        }
    }
    // an argument for the record: such a kernel detects by itself that it must not wake that processor
    let other = old
        .boot_processor
        .filter(|_| old.runs_without_boot_processor)
        .map(|processor| format!("{UNUSED_PROCESSOR_ARGUMENT}{processor}"));
    let longest = old.command_line.len() + 1 + other.as_ref().map_or(0, String::len);
    if other.is_some() && longest > COMMAND_LINE_BYTES_MAX {
        return Err(format!(
            "the command line of the old kernel would have {longest} bytes, and kernels accept {COMMAND_LINE_BYTES_MAX}"
        ));
    }
    let places = placement::choose(old, &image)?;
    let start_data = entry::start_data(old, &image, &places, other.as_deref().unwrap_or_default())?;
    let zero = other.map_or(0, |_| entry::COMMAND_LINE_AT + old.command_line.len() as u64);
    let boot_processor = old.boot_processor.map_or(u64::MAX, u64::from);
    let values = [
        places.start_data + entry::CODE_AT,
        places.start_data,
        places.kernel,
        places.initrd,
        image.real_mode_bytes,
        zero,
        boot_processor,
    ];
    let plan: Vec<u8> = values.iter().flat_map(|number| number.to_le_bytes()).collect();

    let mut inner = Archive::default();
    inner.file("init", PROGRAM);
    inner.directory("stillpoint");
    inner.file("stillpoint/plan", &plan);
    inner.file("stillpoint/rest", &start_data);
    inner.head("stillpoint/kernel", old.kernel.len());
    let before = inner.take();
    inner.tail(old.kernel.len());
    inner.head("stillpoint/initrd", old.initrd.len());
    let between = inner.take();
    inner.tail(old.initrd.len());
    inner.end();
    let after = inner.take();

    let mut outer = Archive::default();
    outer.directory("stillpoint");
    outer.file("stillpoint/first", PROGRAM);
    outer.file("stillpoint/line", &with_zero(crash_line));
    outer.file("stillpoint/next", &with_zero(next));
    for (name, part) in [before.as_slice(), old.kernel, &between, old.initrd, &after].iter().enumerate() {
        outer.file(&format!("stillpoint/{name}"), part);
    }
    outer.end();
    Ok(outer.take())
}

/// Returns the RAM that the next kernel must reserve for the crash kernel: this image, with an initramfs of
/// `initrd_bytes`.
///
/// # Errors
/// The file is not a kernel that a crash kernel can start.
pub fn reservation(kernel: &[u8], initrd_bytes: u64) -> Result<u64, String> {
    let given = kernel.len() as u64 + initrd_bytes;
    // at most two copies at a time: packed and unpacked, then unpacked and loaded
    Ok((BASE_BYTES + image::Image::parse(kernel)?.needed + 2 * given).next_multiple_of(ALIGN))
}

fn with_zero(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

#[cfg(test)]
pub(crate) mod tests;
