//! Archives of small kernels, and their parts.

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
        String::from_utf8(command_line[..command_line.iter().position(|byte| *byte == 0).unwrap()].to_vec()).unwrap()
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
