//! Address of a patch's memory: a free range within reach of its module.

use crate::ledger::Span;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::Mapping;

/// Reach of a signed 32-bit distance in bytes; a little less, because distances count from the ends of instructions.
const REACH: u64 = (1 << 31) - (1 << 20);
/// Room in bytes left for the heap after an executable, and for stacks that grow.
const HEAP_ROOM: u64 = 256 << 20;
/// The lowest address that a process may map.
const LOWEST: u64 = 0x1_0000;
const HIGHEST: u64 = 0x7fff_ffff_f000;
const GUARD: u64 = 4096;

/// Finds `len` free bytes such that every byte of `module` and of the arena can reach every byte of the other. `mappings` must be in
/// ascending order. A range below the module is preferred, because the heap grows above an executable.
///
/// The kernel also puts the next thread's stack directly below a library: `distance` bytes are left free there, if the gap is large enough.
pub(crate) fn find(mappings: &[Mapping], module: Span, len: u64, distance: u64) -> Option<Avma> {
    let window = (module.end().0.saturating_sub(REACH).max(LOWEST), module.start.0.saturating_add(REACH).min(HIGHEST));
    let gaps = gaps(mappings, window);
    let room = len + 2 * GUARD;
    let below = gaps.iter().rev().find(|(start, end)| *end <= module.start.0 && end - start >= room);
    if let Some((start, end)) = below {
        let distance = if end - start >= room + distance { distance } else { 0 };
        return Some(Avma(end - GUARD - len - distance));
    }
    let above = gaps.iter().rev().find(|(start, end)| *start >= module.end().0 && end - start >= room + HEAP_ROOM);
    let near = || gaps.iter().rev().find(|(start, end)| *start >= module.end().0 && end - start >= room);
    // the far end of a gap: a mapping that grows upwards from the start keeps the most room
    above.or_else(near).map(|(_, end)| Avma(end - GUARD - len))
}

/// Returns the free ranges inside `window`, ascending, without the room for a growing stack above them.
fn gaps(mappings: &[Mapping], window: (u64, u64)) -> Vec<(u64, u64)> {
    let mut out = Vec::new();
    let mut at = window.0;
    for mapping in mappings {
        let stack = mapping.path.as_deref() == Some("[stack]");
        let end = if stack { mapping.start.0.saturating_sub(HEAP_ROOM) } else { mapping.start.0 };
        let end = end.min(window.1);
        if end > at {
            out.push((at, end));
        }
        at = at.max(mapping.end.0);
    }
    if window.1 > at {
        out.push((at, window.1));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, end: u64, path: &str) -> Mapping {
        Mapping {
            start: Avma(start),
            end: Avma(end),
            read: true,
            write: false,
            execute: true,
            shared: false,
            offset: 0,
            device: (0, 0),
            inode: 0,
            path: Some(path.into()),
            deleted: false,
        }
    }

    fn reaches(arena: Avma, len: u64, module: Span) -> bool {
        let (low, high) = (arena.0.min(module.start.0), (arena.0 + len).max(module.end().0));
        high - low < 1 << 31
    }

    #[test]
    fn below_a_pie_executable() {
        let module = Span::new(Avma(0x5555_5555_4000), 0x20_0000);
        let maps =
            [mapping(module.start.0, module.end().0, "redis"), mapping(0x5555_5580_0000, 0x5555_6000_0000, "[heap]")];
        let at = find(&maps, module, 0x10000, 0).expect("room");
        assert!(at < module.start && reaches(at, 0x10000, module));
    }

    #[test]
    fn apart_from_the_next_stack() {
        let module = Span::new(Avma(0x7f00_0000_0000), 0x20_0000);
        let library = mapping(module.start.0, module.end().0, "libc");
        let (len, distance) = (0x10000, 64 << 20);
        let near = find(std::slice::from_ref(&library), module, len, 0).expect("room");
        let far = find(std::slice::from_ref(&library), module, len, distance).expect("room");
        assert_eq!(near.0 - far.0, distance);
        assert!(reaches(far, len, module));
        // a gap that is too small for both
        let below = mapping(module.start.0 - (1 << 32), module.start.0 - distance, "below");
        assert_eq!(find(&[below, library], module, len, distance), Some(near));
    }

    #[test]
    fn above_the_heap_of_a_low_executable() {
        let module = Span::new(Avma(0x40_0000), 0x10_0000);
        let maps = [
            mapping(0x1_0000, 0x3f_0000, "low"),
            mapping(0x40_0000, 0x50_0000, "exe"),
            mapping(0x60_0000, 0x200_0000, "[heap]"),
        ];
        let at = find(&maps, module, 0x40_0000, 0).expect("room");
        assert!(at.0 >= 0x200_0000 + HEAP_ROOM && reaches(at, 0x40_0000, module));
    }

    #[test]
    fn between_libraries() {
        let module = Span::new(Avma(0x7f00_0000_0000), 0x10_0000);
        let maps = [
            mapping(0x7eff_0000_0000, 0x7eff_fff0_0000, "lib a"),
            mapping(module.start.0, module.end().0, "lib b"),
            mapping(0x7fff_0000_0000, 0x7fff_0010_0000, "[stack]"),
        ];
        let at = find(&maps, module, 0x10_0000 - 2 * GUARD, 0).expect("room");
        assert_eq!(at, Avma(0x7f00_0000_0000 - 0x10_0000 + GUARD));
        let full = [mapping(0x1000, 0x7fff_ffff_f000, "all"), maps[1].clone()];
        assert_eq!(find(&full, module, 4096, 0), None);
    }
}
