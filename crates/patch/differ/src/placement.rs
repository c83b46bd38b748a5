//! Search for a unit's code in the target: masked comparison; relocations decide among several candidates.

use crate::object_file::{Nature, Object, Reloc};
use crate::reverse::{self, KnownValues};
use crate::target::TargetElf;
use object::elf;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a section that the target has at `address`, equal except for relocated places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) section: usize,
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) address: u64,
}

impl Piece {
    /// Returns the address that the section's start would have.
    pub(crate) fn base(&self) -> u64 {
        self.address.wrapping_sub(self.start)
    }
}

/// Returns the bytes that a linker may change around a relocated place: the field, and the instruction if it relaxes.
fn masked(reloc: &Reloc, len: u64) -> (u64, u64) {
    let (before, after) = match elf::RelocationType(reloc.kind) {
        elf::R_X86_64_GOTPCRELX => (2, 4),
        elf::R_X86_64_GOTPCREL | elf::R_X86_64_REX_GOTPCRELX | elf::R_X86_64_GOTTPOFF => (3, 4),
        elf::R_X86_64_TLSGD => (4, 12),
        elf::R_X86_64_TLSLD => (3, 9),
        elf::R_X86_64_GOTPC32_TLSDESC => (3, 4),
        elf::R_X86_64_TLSDESC_CALL => (0, 2),
        _ => (0, reloc.width()),
    };
    (reloc.offset.saturating_sub(before), (reloc.offset + after).min(len))
}

/// Returns runs of bytes between `start` and `end` that must be equal.
fn solid_runs(object: &Object<'_>, section: usize, start: u64, end: u64) -> Vec<(u64, u64)> {
    let entry = &object.sections[section];
    let (mut runs, mut at) = (Vec::new(), start);
    for reloc in &entry.relocations {
        let (from, to) = masked(reloc, entry.size);
        if to <= start || from >= end {
            continue;
        }
        if from > at {
            runs.push((at, from));
        }
        at = at.max(to);
    }
    if at < end {
        runs.push((at, end));
    }
    runs
}

struct Matcher<'a, 'o> {
    target: &'a TargetElf,
    bytes: &'o [u8],
    start: u64,
    len: u64,
    runs: Vec<(u64, u64)>,
}

impl<'a, 'o> Matcher<'a, 'o> {
    fn new(target: &'a TargetElf, object: &Object<'o>, section: usize, start: u64, end: u64) -> Self {
        let runs = solid_runs(object, section, start, end);
        Matcher { target, bytes: object.sections[section].bytes, start, len: end - start, runs }
    }

    /// Returns true if the target has the bytes at `address`.
    fn at(&self, address: u64) -> bool {
        let Some(there) = self.target.bytes(address, self.len).filter(|_| self.target.is_text(address)) else {
            return false;
        };
        self.runs.iter().all(|&(from, to)| {
            let (ours, theirs) = (from as usize..to as usize, (from - self.start) as usize..(to - self.start) as usize);
            self.bytes.get(ours) == there.get(theirs)
        })
    }
}

/// A range of code and its possible addresses.
#[derive(Debug)]
struct UnplacedRange {
    section: usize,
    start: u64,
    end: u64,
    candidates: BTreeSet<u64>,
    /// True if a place needs confirmation by a reference to it or from it: the linker keeps one of several objects'
    /// copies, and another function may have the same bytes.
    unconfirmed: bool,
}

/// Places of the unit's code, and the values of its names that the target's bytes show.
#[derive(Debug)]
pub(crate) struct Places<'a> {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) known: KnownValues<'a>,
    /// Ranges found at more than one place, by section and start, and the number of places.
    pub(crate) ambiguous: BTreeMap<(usize, u64), usize>,
}

impl Places<'_> {
    /// Returns the address of a byte of a text section, if it is within a piece that was found.
    pub(crate) fn code_address(&self, section: usize, offset: u64) -> Option<u64> {
        let holds = |p: &&Piece| p.section == section && p.start <= offset && offset < p.end.max(p.start + 1);
        self.pieces.iter().find(holds).map(|p| p.base().wrapping_add(offset))
    }
}

/// Finds all code of the unit that the target has.
pub(crate) fn locate<'a>(target: &TargetElf, object: &Object<'a>, globals: &BTreeMap<String, u64>) -> Places<'a> {
    let mut open = candidates(target, object, globals);
    let mut places = Places { pieces: Vec::new(), known: KnownValues::default(), ambiguous: BTreeMap::new() };
    loop {
        let before = places.pieces.len();
        place_unique(target, object, &mut places, &mut open);
        if places.pieces.len() == before
            && !place_by_order(object, &mut places, &mut open)
            && !confirm_by_contents(target, object, &places, &mut open)
        {
            break;
        }
    }
    open.retain(|stretch| !stretch.unconfirmed);
    for stretch in open {
        places.ambiguous.insert((stretch.section, stretch.start), stretch.candidates.len());
    }
    places
}

fn candidates(target: &TargetElf, object: &Object<'_>, globals: &BTreeMap<String, u64>) -> Vec<UnplacedRange> {
    let mut open = Vec::new();
    for (index, section) in object.sections.iter().enumerate() {
        if section.nature != Nature::Text || section.size == 0 || section.bytes.len() as u64 != section.size {
            continue;
        }
        let whole = find(target, object, globals, (index, 0, section.size));
        if !whole.is_empty() {
            let unconfirmed = section.comdat && !is_listed(target, object, globals, index);
            open.push(UnplacedRange { section: index, start: 0, end: section.size, candidates: whole, unconfirmed });
            continue;
        }
        for &symbol in &section.symbols {
            let symbol = &object.symbols[symbol];
            let Some(end) = symbol.value.checked_add(symbol.size).filter(|end| *end <= section.size) else { continue };
            if !symbol.is_function()
                || symbol.size == 0
                || open.iter().any(|o: &UnplacedRange| o.section == index && o.start == symbol.value)
            {
                continue;
            }
            let found = find(target, object, globals, (index, symbol.value, end));
            if !found.is_empty() {
                let unconfirmed = section.comdat && !is_listed(target, object, globals, index);
                open.push(UnplacedRange { section: index, start: symbol.value, end, candidates: found, unconfirmed });
            }
        }
    }
    open
}

/// Returns true if a symbol table or another unit gives the address of a global of the section.
fn is_listed(target: &TargetElf, object: &Object<'_>, globals: &BTreeMap<String, u64>, section: usize) -> bool {
    let globally = |name: &str| target.symbols.get(name).into_iter().flatten().any(|s| s.global);
    object.sections[section]
        .symbols
        .iter()
        .map(|s| &object.symbols[*s])
        .any(|symbol| !symbol.local && (globally(symbol.name) || globals.contains_key(symbol.name)))
}

/// Returns every address at which the target has the range. Tries symbols of the target first, then every start of a
/// function.
fn find(
    target: &TargetElf,
    object: &Object<'_>,
    globals: &BTreeMap<String, u64>,
    (section, start, end): (usize, u64, u64),
) -> BTreeSet<u64> {
    let matcher = Matcher::new(target, object, section, start, end);
    let inside = |s: &&usize| (start..end).contains(&object.symbols[**s].value);
    let functions: Vec<_> =
        object.sections[section].symbols.iter().filter(inside).map(|&s| &object.symbols[s]).collect();
    let listed = |name: &str| target.symbols.get(name).into_iter().flatten().map(|s| s.at);
    let shown = |name: &str, local: bool| globals.get(name).copied().filter(|_| !local);
    let named: BTreeSet<u64> = functions
        .iter()
        .flat_map(|f| listed(f.name).chain(shown(f.name, f.local)).map(|at| at.wrapping_sub(f.value - start)))
        .filter(|address| matcher.at(*address))
        .collect();
    // Code with another listed address is not here, even if the bytes are the same.
    if !named.is_empty() || object.sections[section].comdat && is_listed(target, object, globals, section) {
        return named;
    }
    let first = functions.iter().filter(|f| f.is_function()).map(|f| f.value).min().unwrap_or(start);
    let starts = target.frames.keys().map(|at| at.wrapping_sub(first - start));
    starts.filter(|address| matcher.at(*address)).collect()
}

/// Places every range that has one candidate left, reads it, and drops candidates that contradict known values.
fn place_unique<'a>(target: &TargetElf, object: &Object<'a>, places: &mut Places<'a>, open: &mut Vec<UnplacedRange>) {
    loop {
        let mut moved = false;
        let mut index = 0;
        while index < open.len() {
            let stretch = &mut open[index];
            let known = &places.known;
            if let Some(base) = known.text_base(object, stretch.section)
                && let Some(address) = base.checked_add(stretch.start)
            {
                stretch.candidates.retain(|c| *c == address);
                stretch.unconfirmed = false;
            }
            if stretch.candidates.len() > 1 {
                let (section, start, end) = (stretch.section, stretch.start, stretch.end);
                let consistent = |address: &u64| {
                    let piece = Piece { section, start, end, address: *address };
                    reverse::is_consistent(target, object, known, &piece)
                };
                stretch.candidates.retain(consistent);
            }
            if stretch.candidates.len() > 1 || stretch.unconfirmed && !stretch.candidates.is_empty() {
                index += 1;
                continue;
            }
            let stretch = open.swap_remove(index);
            if let Some(&address) = stretch.candidates.first() {
                let piece = Piece { section: stretch.section, start: stretch.start, end: stretch.end, address };
                reverse::read_code(target, object, &mut places.known, &piece);
                places.pieces.push(piece);
                moved = true;
            }
        }
        if !moved {
            return;
        }
    }
}

/// Uses order: the linker keeps the order of the sections of one object and of the functions of one section. Returns
/// true if that left one candidate for some range.
fn place_by_order(object: &Object<'_>, places: &mut Places<'_>, open: &mut [UnplacedRange]) -> bool {
    let class = |section: usize| {
        let name = object.sections[section].name;
        let kinds = [".text.unlikely", ".text.exit", ".text.startup", ".text.hot", ".text.sorted"];
        kinds.iter().position(|k| name.strip_prefix(k).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    // A copy that the linker kept may be from another object, among that object's functions.
    let own = |section: usize| !object.sections[section].comdat;
    for stretch in open.iter_mut().filter(|stretch| own(stretch.section)) {
        let key = (stretch.section, stretch.start);
        let same = places.pieces.iter().filter(|p| own(p.section) && class(p.section) == class(key.0));
        let (mut low, mut high) = (0, u64::MAX);
        for piece in same {
            if (piece.section, piece.start) < key {
                low = low.max(piece.address.saturating_add(piece.end - piece.start));
            } else {
                high = high.min(piece.address);
            }
        }
        let len = stretch.end - stretch.start;
        let fits = |c: &&u64| **c >= low && c.saturating_add(len) <= high;
        let fitting: BTreeSet<u64> = stretch.candidates.iter().filter(fits).copied().collect();
        if fitting.len() == 1 && low < high {
            stretch.candidates = fitting;
            return true;
        }
    }
    false
}

/// Confirms a range with one candidate that refers to a known place and contradicts none. Returns true if there was
/// one.
fn confirm_by_contents(
    target: &TargetElf,
    object: &Object<'_>,
    places: &Places<'_>,
    open: &mut [UnplacedRange],
) -> bool {
    for stretch in open.iter_mut().filter(|stretch| stretch.unconfirmed && stretch.candidates.len() == 1) {
        let Some(&address) = stretch.candidates.first() else { continue };
        let piece = Piece { section: stretch.section, start: stretch.start, end: stretch.end, address };
        let taken = places.pieces.iter().any(|p| p.address == address);
        if !taken
            && reverse::is_consistent(target, object, &places.known, &piece)
            && reverse::is_confirmed(target, object, &places.known, &piece)
        {
            stretch.unconfirmed = false;
            return true;
        }
    }
    false
}
