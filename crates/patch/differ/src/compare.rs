//! Comparison of two builds of a function or a constant, except for the addresses that the linker chooses.

use crate::correlate::{Correlation, plain_constant};
use crate::object_file::{Home, Nature, Object, Reloc, Site};
use crate::symbol_names;
use std::cell::RefCell;
use std::collections::HashMap;
use stillpoint_patch_format::readable;

/// Two builds of one unit, and the mapping from symbols of the newer to symbols of the older.
#[derive(Debug)]
pub(crate) struct Pair<'p, 'a> {
    pub(crate) old: &'p Object<'a>,
    pub(crate) new: &'p Object<'a>,
    pub(crate) map: &'p Correlation,
    /// Verdicts on constants, by their places. Constants count as equal during their comparison, as they may refer to
    /// themselves.
    constants: RefCell<HashMap<(usize, i64, usize, i64), bool>>,
}

/// The first difference found, as text for people.
pub(crate) type Verdict = Result<(), String>;

/// A range of a section.
#[derive(Debug, Clone, Copy)]
struct Span {
    section: usize,
    start: i64,
    end: i64,
}

impl<'p, 'a> Pair<'p, 'a> {
    pub(crate) fn new(old: &'p Object<'a>, new: &'p Object<'a>, map: &'p Correlation) -> Self {
        Pair { old, new, map, constants: RefCell::default() }
    }

    /// Compares two functions (symbol indices), cold parts included.
    pub(crate) fn functions(&self, old: usize, new: usize) -> Verdict {
        let (Some(a), Some(b)) = (self.old.parts(old), self.new.parts(new)) else {
            return Err("it has no code".to_owned());
        };
        if a.len() != b.len() {
            let gained = if b.len() > a.len() { "gained" } else { "lost" };
            return Err(format!("{gained} a cold part"));
        }
        for (index, (one, other)) in a.iter().zip(&b).enumerate() {
            let part = if index == 0 { "" } else { " (cold part)" };
            self.code(*one, *other, &a, &b).map_err(|why| why + part)?;
            self.exceptions(*one, *other, &a, &b)?;
        }
        Ok(())
    }

    /// Compares the exception tables: equal code may catch another type.
    fn exceptions(&self, old: usize, new: usize, own_old: &[usize], own_new: &[usize]) -> Verdict {
        let (ours, theirs) = (self.old.exception_tables(old), self.new.exception_tables(new));
        let span = |object: &Object<'a>, &(section, start): &(usize, i64)| Span {
            section,
            start,
            end: object.extent(section, start),
        };
        let mut pairs = ours.iter().map(|at| span(self.old, at)).zip(theirs.iter().map(|at| span(self.new, at)));
        if ours.len() != theirs.len() || !pairs.all(|(a, b)| self.spans(a, b, own_old, own_new)) {
            return Err("its exception table differs".to_owned());
        }
        Ok(())
    }

    fn code(&self, old: usize, new: usize, own_old: &[usize], own_new: &[usize]) -> Verdict {
        let (a, b) = (&self.old.sections[old], &self.new.sections[new]);
        if a.bytes.len() != b.bytes.len() {
            return Err(format!("instructions differ ({} bytes became {})", a.bytes.len(), b.bytes.len()));
        }
        let layout = |r: &Reloc| (r.offset, r.kind);
        if a.relocations.len() != b.relocations.len()
            || !a.relocations.iter().map(layout).eq(b.relocations.iter().map(layout))
            || !equal_outside(a.bytes, b.bytes, &a.relocations)
        {
            return Err(format!("instructions differ (both {} bytes)", b.bytes.len()));
        }
        for (one, other) in a.relocations.iter().zip(&b.relocations) {
            self.sites(self.old.site(one), self.new.site(other), own_old, own_new)
                .map_err(|why| format!("at byte {:#x}: {why}", other.offset))?;
        }
        Ok(())
    }

    fn sites(&self, old: Site<'a>, new: Site<'a>, own_old: &[usize], own_new: &[usize]) -> Verdict {
        let differ = || Err(format!("{} became {}", describe(self.old, old), describe(self.new, new)));
        let same = match (old, new) {
            (Site::Extern(a, x), Site::Extern(b, y)) => a == b && x == y,
            (Site::Value(a), Site::Value(b)) => a == b,
            (Site::Inside { section: a, offset: x, .. }, Site::Inside { section: b, offset: y, .. })
                if own_old.contains(&a) || own_new.contains(&b) =>
            {
                // A function's own code moves as a whole: the same part and the same byte of it.
                own_old.iter().position(|s| *s == a) == own_new.iter().position(|s| *s == b) && x == y
            }
            (Site::Inside { .. }, Site::Inside { .. }) => return self.insides(old, new, own_old, own_new),
            (Site::Extern(name, x), Site::Inside { section, offset, .. }) => {
                global_at(self.new, section, offset.wrapping_sub(x)) == Some(name)
            }
            (Site::Inside { section, offset, .. }, Site::Extern(name, x)) => {
                global_at(self.old, section, offset.wrapping_sub(x)) == Some(name)
            }
            _ => false,
        };
        if same { Ok(()) } else { differ() }
    }

    fn insides(&self, old: Site<'a>, new: Site<'a>, own_old: &[usize], own_new: &[usize]) -> Verdict {
        let (Site::Inside { section: a, offset: x, anchor: p }, Site::Inside { section: b, offset: y, anchor: q }) =
            (old, new)
        else {
            return Err("the references are of different kinds".to_owned());
        };
        let differ = || Err(format!("{} became {}", describe(self.old, old), describe(self.new, new)));
        let (one, other) = (self.old.sections[a].nature, self.new.sections[b].nature);
        if let (Nature::Merged { .. }, Nature::Merged { .. }) = (one, other) {
            let same = self.old.literal(a, p).is_some() && self.old.literal(a, p) == self.new.literal(b, q);
            return if same && x.wrapping_sub(p) == y.wrapping_sub(q) { Ok(()) } else { differ() };
        }
        let named = |object: &Object<'a>, section, offset, anchor| {
            let owner = object.owner(section, anchor).or_else(|| object.owner(section, offset));
            owner.filter(|s| !symbol_names::is_anonymous(object.symbols[*s].name))
        };
        match (named(self.old, a, x, p), named(self.new, b, y, q)) {
            (Some(s), Some(t)) => {
                let delta = |object: &Object<'a>, s: usize, at: i64| at.wrapping_sub(object.symbols[s].value as i64);
                if delta(self.old, s, x) != delta(self.new, t, y) {
                    return differ();
                }
                if !self.correlated(s, t) {
                    return if self.are_equal_constants(s, t) { Ok(()) } else { differ() };
                }
                if self.is_private_constant(t) && !self.constant_equal(s, t) {
                    let name = readable(self.new.symbols[t].name);
                    return Err(format!("it refers to constant `{name}`, which changed"));
                }
                Ok(())
            }
            (None, None) if x.wrapping_sub(p) == y.wrapping_sub(q) => {
                let (from, to) = (self.old.extent(a, p), self.new.extent(b, q));
                let spans = (Span { section: a, start: p, end: from }, Span { section: b, start: q, end: to });
                if self.spans(spans.0, spans.1, own_old, own_new) { Ok(()) } else { differ() }
            }
            _ => differ(),
        }
    }

    /// Returns true for two constants of one name, apart from its number, that have the same bytes.
    fn are_equal_constants(&self, old: usize, new: usize) -> bool {
        let stem = |object: &Object<'a>, symbol: usize| symbol_names::stem(object.symbols[symbol].name);
        let (one, other) = (plain_constant(self.old, old), plain_constant(self.new, new));
        one.is_some() && one == other && stem(self.old, old) == stem(self.new, new)
    }

    /// Returns true if any name at the old symbol's place matches any at the new one's: aliases and folded functions
    /// share places.
    pub(crate) fn correlated(&self, old: usize, new: usize) -> bool {
        let same_place = |object: &Object<'a>, s: usize, t: usize| {
            let (a, b) = (&object.symbols[s], &object.symbols[t]);
            a.home == b.home && a.value == b.value
        };
        let Home::Section(section) = self.new.symbols[new].home else { return self.map.old(new) == Some(old) };
        let aliases = self.new.sections[section].symbols.iter().filter(|s| same_place(self.new, **s, new));
        aliases.filter_map(|s| self.map.old(*s)).any(|s| same_place(self.old, s, old))
    }

    /// Returns true for a constant that no other unit and no pointer arithmetic of the linker can reach. For a constant
    /// of inline code, only the units that have its source can, and all of these are known.
    pub(crate) fn is_private_constant(&self, new: usize) -> bool {
        let symbol = &self.new.symbols[new];
        let Home::Section(section) = symbol.home else { return false };
        let constant = matches!(self.new.sections[section].nature, Nature::Constant | Nature::Merged { .. });
        (symbol.local || self.new.is_comdat(new)) && constant && !symbol_names::is_class_data(symbol.name)
    }

    /// Returns true if two variables have the same size and initial contents.
    pub(crate) fn constant_equal(&self, old: usize, new: usize) -> bool {
        let span = |object: &Object<'a>, s: usize| {
            let symbol = &object.symbols[s];
            let Home::Section(section) = symbol.home else { return None };
            let start = symbol.value as i64;
            Some(Span { section, start, end: start.checked_add(i64::try_from(symbol.size).ok()?)? })
        };
        // The name of an unnamed class contains a number of the compiler.
        if self.new.symbols[new].name.starts_with("_ZTS") && self.map.old(new) == Some(old) {
            return true;
        }
        match (span(self.old, old), span(self.new, new)) {
            (Some(a), Some(b)) => self.spans(a, b, &[], &[]),
            (None, None) => self.old.symbols[old].size == self.new.symbols[new].size,
            _ => false,
        }
    }

    /// Returns the first pointer in which two constants of one size differ.
    pub(crate) fn first_difference(&self, old: usize, new: usize) -> Option<String> {
        let within = |object: &'p Object<'a>, s: usize| {
            let symbol = &object.symbols[s];
            let Home::Section(section) = symbol.home else { return Vec::new() };
            let range = symbol.value..symbol.value.saturating_add(symbol.size);
            let all = object.sections[section].relocations.iter().filter(|r| range.contains(&r.offset));
            all.map(|r| (r.offset - range.start, r)).collect::<Vec<_>>()
        };
        let (ours, theirs) = (within(self.old, old), within(self.new, new));
        let theirs: HashMap<u64, &Reloc> = theirs.into_iter().collect();
        ours.into_iter().find_map(|(offset, one)| {
            let other = theirs.get(&offset)?;
            let why = self.sites(self.old.site(one), self.new.site(other), &[], &[]).err()?;
            Some(format!("entry {}: {why}", offset / 8))
        })
    }

    fn spans(&self, old: Span, new: Span, own_old: &[usize], own_new: &[usize]) -> bool {
        let key = (old.section, old.start, new.section, new.start);
        if let Some(verdict) = self.constants.borrow().get(&key) {
            return *verdict;
        }
        self.constants.borrow_mut().insert(key, true);
        let verdict = self.spans_equal(old, new, own_old, own_new);
        self.constants.borrow_mut().insert(key, verdict);
        verdict
    }

    fn spans_equal(&self, old: Span, new: Span, own_old: &[usize], own_new: &[usize]) -> bool {
        // The bytes, and the number of zero bytes after them.
        let contents = |object: &Object<'a>, span: Span| {
            let section = &object.sections[span.section];
            let (start, end) = (usize::try_from(span.start).ok()?, usize::try_from(span.end).ok()?);
            let none: &[u8] = &[];
            if section.bytes.is_empty() {
                return (end as u64 <= section.size).then(|| Some((none, end.checked_sub(start)?)))?;
            }
            section.bytes.get(start..end).map(|bytes| (bytes, 0))
        };
        let relocations = |object: &Object<'a>, span: Span| {
            let all = object.sections[span.section].relocations.iter();
            let inside = |r: &&Reloc| (span.start..span.end).contains(&(r.offset as i64));
            all.filter(inside).map(|r| Reloc { offset: r.offset - span.start as u64, ..*r }).collect::<Vec<_>>()
        };
        let (Some(a), Some(b)) = (contents(self.old, old), contents(self.new, new)) else { return false };
        let (ours, theirs) = (relocations(self.old, old), relocations(self.new, new));
        let layout = |r: &Reloc| (r.offset, r.kind);
        let bytes_equal = match (a, b) {
            ((a, 0), (b, 0)) => a.len() == b.len() && equal_outside(a, b, &ours),
            ((a, zeros), (b, others)) => {
                a.len() + zeros == b.len() + others && a.iter().chain(b).all(|byte| *byte == 0)
            }
        };
        bytes_equal
            && ours.iter().map(layout).eq(theirs.iter().map(layout))
            && ours
                .iter()
                .zip(&theirs)
                .all(|(one, other)| self.sites(self.old.site(one), self.new.site(other), own_old, own_new).is_ok())
    }
}

/// Returns true if two texts are equal except for relocated places.
pub(crate) fn equal_outside(a: &[u8], b: &[u8], relocations: &[Reloc]) -> bool {
    let mut at = 0;
    for reloc in relocations {
        let (from, to) = (reloc.offset as usize, (reloc.offset + reloc.width()) as usize);
        if from > at && a.get(at..from) != b.get(at..from) {
            return false;
        }
        at = at.max(to);
    }
    a.get(at..) == b.get(at..)
}

/// Returns the global symbol exactly at a place.
fn global_at<'a>(object: &Object<'a>, section: usize, offset: i64) -> Option<&'a str> {
    let at = |s: &&usize| object.symbols[**s].value as i64 == offset && !object.symbols[**s].local;
    object.sections[section].symbols.iter().find(at).map(|s| object.symbols[*s].name)
}

fn describe(object: &Object<'_>, site: Site<'_>) -> String {
    match site {
        Site::Extern(name, _) => format!("`{}`", readable(name)),
        Site::Value(value) => format!("{value:#x}"),
        Site::Inside { section, offset, anchor } => {
            if let Some(literal) = object.literal(section, anchor)
                && matches!(object.sections[section].nature, Nature::Merged { strings: true, .. })
            {
                let text: String = String::from_utf8_lossy(literal).trim_end_matches('\0').chars().take(40).collect();
                return format!("text {text:?}");
            }
            match object.owner(section, anchor) {
                Some(owner) if object.symbols[owner].value as i64 == offset => {
                    format!("`{}`", readable(object.symbols[owner].name))
                }
                Some(owner) => format!(
                    "`{}`{:+}",
                    readable(object.symbols[owner].name),
                    offset.wrapping_sub(object.symbols[owner].value as i64)
                ),
                None => format!("a constant in `{}`", object.sections[section].name),
            }
        }
    }
}
