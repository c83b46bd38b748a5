//! RAM that kernels are told not to use: `memmap=SIZE!START`, and the places where it may be located.

use std::ops::Range;

/// Alignment of a region: large pages.
const ALIGN: u64 = 2 << 20;
/// Maximum of arguments that the kernel's decompressor respects; with more it does not choose a random address.
const ARGUMENTS_MAX: usize = 4;
/// Address below which firmware and boot loaders work.
const HIGH_MEMORY_START: u64 = 4 << 30;
/// Lowest addresses in low memory, the first if there is room: kernels, their initramfs and crash kernels are located
/// at the bottom.
const LOW_MEMORY_STARTS: [u64; 2] = [1 << 30, 256 << 20];
/// Bytes of RAM that are left to the kernel.
const RAM_BYTES_LEFT_MIN: u64 = 512 << 20;

/// One range of a `memmap=` argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memmap {
    /// Character between size and start: `!` makes it a region of persistent memory.
    pub(crate) kind: char,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl Memmap {
    fn parse(text: &str) -> Option<Self> {
        let at = text.find(['!', '$', '#', '@', '%'])?;
        let (size, rest) = text.split_at(at);
        let kind = rest.chars().next()?;
        // after `%` the value continues with types
        let start = rest[1..].split('-').next()?;
        Some(Memmap { kind, start: parse_number(start)?, bytes: parse_number(size)? })
    }

    fn range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.bytes)
    }
}

/// Parses a number as the kernel does: decimal, octal or hexadecimal, and a letter for its unit.
pub(crate) fn parse_number(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().next_back()? {
        (at, letter) if letter.is_ascii_alphabetic() && !text.starts_with("0x") || "KMGTkmgt".contains(letter) => {
            let shift = 10 * (1 + "kmgt".find(letter.to_ascii_lowercase())? as u32);
            (&text[..at], shift)
        }
        _ => (text, 0),
    };
    let number = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16),
        None if digits.len() > 1 && digits.starts_with('0') => u64::from_str_radix(digits, 8),
        None => digits.parse(),
    };
    number.ok()?.checked_mul(1 << shift)
}

/// Returns every value of every `memmap=` of a command line; `None` for one that names no range.
fn parse_all(line: &str) -> Vec<Option<Memmap>> {
    let values = line.split_whitespace().filter_map(|part| part.strip_prefix("memmap="));
    values.flat_map(|value| value.split(',')).map(Memmap::parse).collect()
}

/// Returns RAM that a kernel with this command line does not use as RAM.
pub(crate) fn excluded_ranges(line: &str) -> Result<Vec<Range<u64>>, String> {
    let ranges = parse_all(line).into_iter().map(|found| found.ok_or("the command line has a memmap= without a range"));
    let ranges: Vec<Memmap> = ranges.collect::<Result<_, _>>()?;
    Ok(ranges.iter().filter(|range| range.kind != '@').map(Memmap::range).collect())
}

/// Checks that a kernel started with `next` does not use the region that this one, started with `running`, does not
/// use; the error names the command line.
pub(crate) fn check_excluded(region: Range<u64>, running: &str, next: &str) -> Result<(), String> {
    let is_it = |found: &Memmap| found.kind == '!' && found.range() == region;
    let (here, there) = (parse_all(running), parse_all(next));
    let what = format!("{:#x}-{:#x}, in which the images are located", region.start, region.end - 1);
    // without an argument the region comes from the firmware, for every kernel
    if here.iter().flatten().any(is_it) && !there.iter().flatten().any(is_it) {
        let argument = argument(&region);
        return Err(format!("the next kernel would use {what}: its command line has no {argument}"));
    }
    let other = there.iter().flatten().find(|other| {
        let range = other.range();
        !is_it(other) && range.start < region.end && region.start < range.end
    });
    if let Some(other) = other {
        return Err(format!(
            "the next kernel's memmap={:#x}{}{:#x} overlaps {what}",
            other.bytes, other.kind, other.start
        ));
    }
    if there.len() > ARGUMENTS_MAX {
        return Err(format!(
            "the next kernel's command line has {} ranges of memmap, and kernels support {ARGUMENTS_MAX}",
            there.len()
        ));
    }
    Ok(())
}

/// Returns a region as an argument of a command line.
pub(crate) fn argument(region: &Range<u64>) -> String {
    let bytes = region.end - region.start;
    let size = if bytes.is_multiple_of(1 << 30) { format!("{}G", bytes >> 30) } else { format!("{}M", bytes >> 20) };
    format!("memmap={size}!{:#x}", region.start)
}

/// The physical memory of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ram {
    /// RAM of the kernel.
    system: Vec<Range<u64>>,
    /// Parts of it that hold the kernel, its crash kernel, or tables of the firmware.
    used: Vec<Range<u64>>,
    /// Existing regions.
    pub(crate) regions: Vec<Range<u64>>,
}

impl Ram {
    /// Parses `/proc/iomem`, as root sees it.
    pub(crate) fn parse(iomem: &str) -> Result<Self, String> {
        let mut ram = Ram::default();
        let mut inside = false;
        for line in iomem.lines() {
            let Some((range, name)) = line.split_once(" : ") else { continue };
            let nested = range.starts_with(' ');
            let bound = |text: &str| u64::from_str_radix(text, 16).ok();
            let parsed =
                range.trim().split_once('-').and_then(|(from, to)| Some(bound(from)?..bound(to)?.checked_add(1)?));
            let Some(range) = parsed.filter(|range| range.start < range.end) else {
                return Err(format!("/proc/iomem is not understood: {line}"));
            };
            if !nested {
                inside = name == "System RAM";
            }
            match (nested, name) {
                (false, "System RAM") => ram.system.push(range),
                (false, "Persistent Memory (legacy)") => ram.regions.push(range),
                (true, _) if inside => ram.used.push(range),
                _ => {}
            }
        }
        // a process without root's rights reads zeros
        if ram.system.iter().all(|range| range.end <= 1) {
            return Err("/proc/iomem names no RAM: this needs root".into());
        }
        Ok(ram)
    }

    /// Chooses an aligned range for a region, within the RAM that the firmware reports (no limit if it reports none).
    pub(crate) fn choose(&self, bytes: u64, firmware: &[Range<u64>], running: &str) -> Result<Range<u64>, String> {
        if bytes == 0 || !bytes.is_multiple_of(ALIGN) {
            return Err("the size of a region must be a multiple of 2M".into());
        }
        let there = parse_all(running);
        if there.len() >= ARGUMENTS_MAX {
            return Err(format!(
                "the command line has {} ranges of memmap already, and kernels support {ARGUMENTS_MAX}",
                there.len()
            ));
        }
        if there.iter().any(Option::is_none) {
            return Err("the command line has a memmap= without a range: RAM is not as the firmware reports".into());
        }
        let total = self.system.iter().fold(0_u64, |total, range| total.saturating_add(range.end - range.start));
        if total < bytes.saturating_add(RAM_BYTES_LEFT_MIN) {
            let (total, most) = (total >> 20, total.saturating_sub(RAM_BYTES_LEFT_MIN) >> 20);
            return Err(format!(
                "{total} MiB of RAM: a region may take {most} of them, so that {} are left",
                RAM_BYTES_LEFT_MIN >> 20
            ));
        }
        let mut free = self.free_ranges(firmware);
        free.sort_by_key(|range| range.start);
        let aligned_range = |range: &Range<u64>, from: u64| {
            let start = range.start.max(from).checked_next_multiple_of(ALIGN)?;
            (start.checked_add(bytes)? <= range.end).then_some(start..start + bytes)
        };
        // From the bottom of RAM: boot loaders and firmware take memory from the top
        let high = free
            .iter()
            .filter(|range| range.end > HIGH_MEMORY_START)
            .find_map(|range| aligned_range(range, HIGH_MEMORY_START));
        let low =
            || LOW_MEMORY_STARTS.iter().find_map(|from| free.iter().find_map(|range| aligned_range(range, *from)));
        high.or_else(low).ok_or_else(|| {
            let largest = free.iter().map(|range| range.end - range.start).max().unwrap_or(0) >> 20;
            format!("there is no free range of {} MiB: the largest one has {largest}", bytes >> 20)
        })
    }

    /// Returns RAM that nothing uses.
    fn free_ranges(&self, firmware: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut free: Vec<Range<u64>> = Vec::new();
        for ram in &self.system {
            let told = firmware.iter().map(|range| range.start.max(ram.start)..range.end.min(ram.end));
            free.extend(if firmware.is_empty() { vec![ram.clone()] } else { told.collect() });
        }
        let is_some = |range: &Range<u64>| range.start < range.end;
        free.retain(is_some);
        for used in &self.used {
            let parts =
                |range: Range<u64>| [range.start..range.end.min(used.start), range.start.max(used.end)..range.end];
            // without this filter each range would double the number of empty parts
            free = free.into_iter().flat_map(parts).filter(is_some).collect();
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of a machine with 6 GiB, as QEMU has it; with a crash kernel.
    const IOMEM: &str = "\
00000000-00000fff : Reserved
00001000-0009fbff : System RAM
000f0000-000fffff : Reserved
00100000-bffdffff : System RAM
  1d000000-1dbfffff : Kernel code
  1de00000-1e1fffff : Kernel rodata
  9f000000-aeffffff : Crash kernel
bffe0000-bfffffff : Reserved
  bffe0000-bffeffff : ACPI Tables
fed00000-fed003ff : HPET 0
100000000-1bfffffff : System RAM
";
    const G: u64 = 1 << 30;

    fn firmware() -> Vec<Range<u64>> {
        vec![0..0x9fc00, 0x10_0000..0xbffe_0000, 4 * G..7 * G]
    }

    #[test]
    fn numbers_are_read_as_the_kernel_reads_them() {
        for (text, expected) in [
            ("4G", Some(4 * G)),
            ("0x100000000", Some(4 * G)),
            ("0x40000K", Some(G >> 2)),
            ("512m", Some(G / 2)),
            ("010", Some(8)),
            ("", None),
            ("G", None),
            ("4Q", None),
        ] {
            assert_eq!(parse_number(text), expected, "{text}");
        }
        assert_eq!(parse_number("0xb"), Some(11));
    }

    #[test]
    fn a_region_lies_above_four_gib_where_there_is_room_and_on_nothing() {
        let ram = Ram::parse(IOMEM).unwrap();
        let choose = |bytes| ram.choose(bytes, &firmware(), "quiet");
        assert_eq!(choose(2 * G).unwrap(), 4 * G..6 * G);
        assert_eq!(argument(&choose(2 * G).unwrap()), "memmap=2G!0x100000000");
        assert!(choose(5 * G).unwrap_err().contains("no free range of 5120 MiB: the largest one has 3072"));
        assert!(choose(6 * G).unwrap_err().contains("may take 5631 of them"));
        assert!(choose(3 << 20).unwrap_err().contains("a multiple of 2M"));
    }

    #[test]
    fn ranges_that_are_used_cost_no_more_than_they_are_many() {
        let line = |start: u64| format!("  {start:x}-{:x} : Kernel data\n", start + 0xfff);
        let used: String = (1..=1000).map(|n| line(4 * G + (n << 21))).collect();
        let ram = Ram::parse(&format!("{IOMEM}{used}")).unwrap();
        assert!(ram.free_ranges(&[]).len() < 1010);
        assert_eq!(ram.choose(2 << 20, &[], "").unwrap(), 4 * G..4 * G + (2 << 20));
    }

    #[test]
    fn in_low_memory_it_avoids_kernels_and_the_firmware_s_tables() {
        let low = &IOMEM[..IOMEM.find("100000000-").unwrap()];
        let ram = Ram::parse(low).unwrap();
        assert_eq!(ram.choose(256 << 20, &firmware(), "").unwrap(), G..G + (256 << 20));
        // below the crash kernel there is room for it only from 256 MiB on, and after the kernel itself
        assert_eq!(ram.choose(1800 << 20, &firmware(), "").unwrap().start, 0x1e20_0000);
        assert!(ram.choose(0x8_1000_0000, &[], "").is_err());
        // memory that the firmware does not report as RAM is not RAM
        assert!(ram.choose(G, &[0..0x9fc00, 0x10_0000..G], "").is_err());
    }

    #[test]
    fn users_other_than_root_see_no_addresses() {
        let told = "00000000-00000000 : System RAM\n  00000000-00000000 : Kernel code\n";
        assert!(Ram::parse(told).unwrap_err().contains("needs root"));
    }

    #[test]
    fn what_there_is_already_counts() {
        let ram =
            Ram::parse("100000000-1bfffffff : Persistent Memory (legacy)\n1c0000000-3bfffffff : System RAM\n").unwrap();
        assert_eq!(ram.regions.iter().map(|range| (range.start, range.end)).collect::<Vec<_>>(), [(4 * G, 7 * G)]);
        let four = "memmap=1M!1G,1M!2G memmap=64K$0x18690000 memmap=1M#3G";
        assert!(ram.choose(G, &[], four).unwrap_err().contains("4 ranges of memmap already"));
        assert!(ram.choose(G, &[], "memmap=exactmap").unwrap_err().contains("without a range"));
        assert_eq!(ram.choose(G, &[], "memmap=3G!4G").unwrap(), 7 * G..8 * G);
    }

    #[test]
    fn what_is_no_ram_to_a_kernel_is_known_by_its_command_line() {
        assert_eq!(
            excluded_ranges("quiet memmap=1G!4G memmap=64K$0x10000,1G@1G").unwrap(),
            [4 * G..5 * G, 0x1_0000..0x2_0000]
        );
        assert!(excluded_ranges("memmap=exactmap").unwrap_err().contains("without a range"));
    }

    #[test]
    fn the_next_kernel_must_keep_what_this_one_keeps() {
        let region = 4 * G..6 * G;
        let here = "quiet memmap=2G!4G";
        let next = |line: &str| check_excluded(region.clone(), here, line);
        // in any notation
        next("memmap=0x80000000!0x100000000 panic=1").unwrap();
        next("memmap=1M!1G,2G!4G").unwrap();
        assert!(next("quiet").unwrap_err().contains("has no memmap=2G!0x100000000"));
        assert!(next("memmap=1G!4G").unwrap_err().contains("has no memmap=2G"));
        assert!(next("memmap=2G$4G").unwrap_err().contains("has no memmap=2G!"));
        assert!(next("memmap=2G!4G memmap=1G$5G").unwrap_err().contains("memmap=0x40000000$0x140000000 overlaps"));
        assert!(next("memmap=2G!4G,1M!1M,1M!2M,1M!3M,1M!7M").unwrap_err().contains("5 ranges"));
        // reported by the firmware: it is valid for every kernel
        check_excluded(region.clone(), "quiet", "quiet").unwrap();
        assert!(check_excluded(region, "quiet", "memmap=4K$5G").unwrap_err().contains("overlaps"));
    }
}
