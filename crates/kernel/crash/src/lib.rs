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
pub(crate) mod tests {
    use super::*;

    /// Returns a kernel's image without a kernel: its header, and some bytes after the code for real mode.
    pub(crate) fn image() -> Vec<u8> {
        let mut image = vec![0; 4096];
        image[0x1f1] = 3;
        image[0x201] = 0x6a;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
        image[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
        image[0x230..0x234].copy_from_slice(&(2_u32 << 20).to_le_bytes());
        image[0x234] = 1;
        image[0x236] = 1;
        image[0x258..0x260].copy_from_slice(&(16_u64 << 20).to_le_bytes());
        image[0x260..0x264].copy_from_slice(&(50_u32 << 20).to_le_bytes());
        image
    }

    /// Returns boot parameters of a machine with RAM of `bytes` from 1 MiB on.
    pub(crate) fn parameters(bytes: u64) -> Vec<u8> {
        let mut parameters = vec![0; 4096];
        parameters[0x1e8] = 2;
        for (at, (start, length)) in [(0x2d0, (0, 0x9fc00)), (0x2e4, (1 << 20, bytes))] {
            let entry = [u64::to_le_bytes(start), u64::to_le_bytes(length)].concat();
            parameters[at..at + 16].copy_from_slice(&entry);
            parameters[at + 16] = 1;
        }
        parameters
    }

    pub(crate) fn old<'a>(kernel: &'a [u8], parameters: &'a [u8]) -> OldKernel<'a> {
        OldKernel {
            kernel,
            initrd: b"an initramfs",
            parameters,
            command_line: "quiet",
            preserved: &[],
            boot_processor: Some(5),
            runs_without_boot_processor: true,
        }
    }

    /// Returns the files of an archive, with their content.
    fn files(mut archive: &[u8]) -> Vec<(String, Vec<u8>)> {
        let mut found = Vec::new();
        loop {
            assert_eq!(&archive[..6], b"070701");
            let field = |n: usize| usize::from_str_radix(std::str::from_utf8(&archive[6 + 8 * n..][..8]).unwrap(), 16);
            let (size, name) = (field(6).unwrap(), field(11).unwrap());
            let text = String::from_utf8(archive[110..110 + name - 1].to_vec()).unwrap();
            let data = (110 + name).next_multiple_of(4);
            if text == "TRAILER!!!" {
                return found;
            }
            found.push((text, archive[data..data + size].to_vec()));
            archive = &archive[(data + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn parts_one_behind_another_are_the_crash_kernel_s_initramfs() {
        let (kernel, parameters) = (image(), parameters(1 << 30));
        let outer = files(&archive(&old(&kernel, &parameters), "panic=1", "/init").unwrap());
        let names: Vec<&str> = outer.iter().map(|(name, _)| name.trim_start_matches("stillpoint/")).collect();
        assert_eq!(names, ["stillpoint", "first", "line", "next", "0", "1", "2", "3", "4"]);
        assert_eq!((outer[2].1.as_slice(), outer[3].1.as_slice()), (&b"panic=1\0"[..], &b"/init\0"[..]));
        assert_eq!((&outer[5].1, outer[7].1.as_slice()), (&kernel, &b"an initramfs"[..]));
        let inner = files(&outer[4..].iter().flat_map(|(_, part)| part.clone()).collect::<Vec<u8>>());
        let of = |name: &str| &inner.iter().find(|(known, _)| known == name).unwrap().1;
        assert_eq!((of("init").as_slice(), of("stillpoint/kernel")), (PROGRAM, &kernel));
        assert_eq!(of("stillpoint/initrd").as_slice(), b"an initramfs");
        let plan: Vec<u64> =
            of("stillpoint/plan").chunks(8).map(|number| u64::from_le_bytes(number.try_into().unwrap())).collect();
        let [entry, start_data, kernel_at, _, real_mode_bytes, zero, boot_processor] = plan[..] else {
            panic!("{plan:x?}")
        };
        assert_eq!(
            (entry - start_data, kernel_at, real_mode_bytes, boot_processor),
            (entry::CODE_AT, 16 << 20, 4 * 512, 5)
        );
        // the change that the program makes when another processor panicked
        let mut start_data = of("stillpoint/rest").clone();
        let text = |start_data: &[u8]| {
            let command_line = &start_data[entry::COMMAND_LINE_AT as usize..];
            String::from_utf8(command_line[..command_line.iter().position(|byte| *byte == 0).unwrap()].to_vec())
                .unwrap()
        };
        assert_eq!(text(&start_data), "quiet");
        start_data[zero as usize] = b' ';
        assert_eq!(text(&start_data), "quiet disable_cpu_apicid=5");
    }

    #[test]
    fn lines_that_a_kernel_would_cut_off_are_refused() {
        let (kernel, parameters) = (image(), parameters(1 << 30));
        let command_line = "x".repeat(COMMAND_LINE_BYTES_MAX);
        let old = OldKernel { command_line: &command_line, ..old(&kernel, &parameters) };
        assert!(archive(&old, "", "/init").unwrap_err().contains("would have 2068 bytes"));
        archive(&OldKernel { boot_processor: None, ..old }, &command_line, "/init").unwrap();
        assert!(archive(&old, &"x".repeat(COMMAND_LINE_BYTES_MAX + 1), "/init").unwrap_err().contains("2048 bytes"));
    }

    #[test]
    fn a_kernel_that_needs_its_first_processor_has_no_line_without_it() {
        let (kernel, parameters) = (image(), parameters(1 << 30));
        let old = OldKernel { runs_without_boot_processor: false, ..old(&kernel, &parameters) };
        let outer = files(&archive(&old, "", "/init").unwrap());
        let inner = files(&outer[4..].iter().flat_map(|(_, part)| part.clone()).collect::<Vec<u8>>());
        let plan = &inner.iter().find(|(name, _)| name == "stillpoint/plan").unwrap().1;
        assert_eq!((&plan[40..48], &plan[48..56]), (&[0; 8][..], &[5, 0, 0, 0, 0, 0, 0, 0][..]));
    }

    #[test]
    fn what_is_reserved_has_room_for_all_twice() {
        // 64 MiB, and 50 that the kernel needs
        assert_eq!(reservation(&image(), 0).unwrap(), 128 << 20);
        assert_eq!(reservation(&image(), 30 << 20).unwrap(), 176 << 20);
        assert!(reservation(b"no kernel", 0).is_err());
    }
}
