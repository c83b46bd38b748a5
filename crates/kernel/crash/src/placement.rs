//! Places of the old kernel and its data in the machine's memory.

use crate::OldKernel;
use crate::entry::START_DATA_BYTES;
use crate::image::Image;
use std::ops::Range;
use stillpoint_base::PAGE;

/// End of the memory that the old kernel's first page tables map.
const MAPPED_END: u64 = 4 << 30;
/// Type of usable memory in the firmware's map.
const E820_RAM: u64 = 1;
/// The map of memory in the boot parameters: offsets of the count and of the entries, length of an entry, maximum
/// count.
const COUNT_AT: usize = 0x1e8;
const MAP_AT: usize = 0x2d0;
const ENTRY_BYTES: usize = 20;
const ENTRIES_MAX: usize = 128;

/// Address of each part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) kernel: u64,
    pub(crate) start_data: u64,
    pub(crate) initrd: u64,
}

/// Returns the lowest places in free RAM that need not be kept, from the kernel's preferred address on.
pub(crate) fn choose(old: &OldKernel<'_>, image: &Image) -> Result<Places, String> {
    let mut free = ram(old.parameters)?;
    for preserved in old.preserved {
        free = free.iter().flat_map(|range| without(range, preserved)).collect();
    }
    free.sort_by_key(|range| range.start);
    let mut take = |bytes: u64, align: u64, end: u64| {
        let fit = |range: &Range<u64>| {
            let start = range.start.max(image.preferred).next_multiple_of(align);
            let found = start..start.checked_add(bytes)?;
            (found.end <= range.end.min(end).min(MAPPED_END)).then_some(found)
        };
        let found = free.iter().find_map(fit).ok_or_else(|| {
            format!(
                "the old kernel cannot be started by a crash kernel: there is no free range of {} MiB of RAM",
                bytes >> 20
            )
        })?;
        free = free.iter().flat_map(|range| without(range, &found)).collect();
        Ok::<u64, String>(found.start)
    };
    let kernel = take(image.needed.next_multiple_of(PAGE), image.align.max(PAGE), MAPPED_END)?;
    let start_data = take(START_DATA_BYTES, PAGE, MAPPED_END)?;
    let initrd = take((old.initrd.len() as u64).next_multiple_of(PAGE), PAGE, image.initrd_end)?;
    Ok(Places { kernel, start_data, initrd })
}

/// Returns the RAM that the firmware has reported to the running kernel.
fn ram(parameters: &[u8]) -> Result<Vec<Range<u64>>, String> {
    let failed = || "the parameters that this kernel was started with are not understood".to_owned();
    let count = usize::from(*parameters.get(COUNT_AT).ok_or_else(failed)?);
    if count == 0 || count > ENTRIES_MAX {
        return Err(failed());
    }
    let map = parameters.get(MAP_AT..MAP_AT + count * ENTRY_BYTES).ok_or_else(failed)?;
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let entries =
        map.chunks_exact(ENTRY_BYTES).map(|entry| (number(&entry[..8]), number(&entry[8..16]), number(&entry[16..])));
    Ok(entries
        .filter(|(.., kind)| *kind == E820_RAM)
        .map(|(start, bytes, _)| start..start.saturating_add(bytes))
        .collect())
}

fn without(range: &Range<u64>, taken: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let parts = [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end];
    parts.into_iter().filter(|part| part.start < part.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{image, old, parameters};
    use std::slice::from_ref;

    const M: u64 = 1 << 20;

    #[test]
    fn everything_lies_in_ram_and_apart() {
        let (kernel, parameters) = (image(), parameters(1 << 30));
        let image = Image::parse(&kernel).unwrap();
        let places = choose(&old(&kernel, &parameters), &image).unwrap();
        assert_eq!(places, Places { kernel: 16 * M, start_data: 66 * M, initrd: 66 * M + START_DATA_BYTES });
    }

    #[test]
    fn what_is_kept_is_left_alone_and_no_room_is_told() {
        let (kernel, parameters) = (image(), parameters(199 * M));
        let image = Image::parse(&kernel).unwrap();
        let with = |preserved: Range<u64>| {
            choose(&OldKernel { preserved: from_ref(&preserved), ..old(&kernel, &parameters) }, &image)
        };
        let places = with(20 * M..100 * M).unwrap();
        assert_eq!(places, Places { kernel: 100 * M, start_data: 16 * M, initrd: 16 * M + START_DATA_BYTES });
        // the kernel fits neither after nor before the memory to keep
        assert!(with(60 * M..160 * M).unwrap_err().contains("no free range of 50 MiB of RAM"));
        let high = OldKernel { initrd: &[0; 4096], ..old(&kernel, &parameters) };
        let image = Image { initrd_end: 60 * M, ..image };
        assert!(choose(&high, &image).unwrap_err().contains("no free range of 0 MiB of RAM"));
    }

    #[test]
    fn parameters_that_are_none_are_refused() {
        for bytes in [&[][..], &[0; 4096], &[255; 4096], &[1; 0x2d0]] {
            assert!(ram(bytes).unwrap_err().contains("not understood"));
        }
        // memory that is not RAM is not used
        let mut parameters = parameters(1 << 30);
        parameters[MAP_AT + 16] = 2;
        let only = ram(&parameters).unwrap();
        assert_eq!((only.len(), &only[0]), (1, &(M..M + (1 << 30))));
    }
}
