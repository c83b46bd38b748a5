//! Pairs of symbols: each symbol of one object with the same symbol in another build of the unit.
//!
//! A wrong pair of *functions* does no harm, since callers are compared under the same pairing. A wrong pair of
//! *variables* would mix their states. So a static whose name has a number of the compiler is paired by its use in
//! equal code, or else by its stem and its users, or by the function that declares it, or not at all.

use crate::object_file::{Home, Nature, Object, Site, SymbolType};
use crate::symbol_names;
use crate::types::Scopes;
use crate::unnamed_types::{self, Classes, Closures};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use stillpoint_patch_format::readable;

/// Symbols of the older and of the newer object that may be pairs.
type Candidates = (Vec<usize>, Vec<usize>);

/// Mapping from the symbols of a newer object to those of an older one.
#[derive(Debug, Default)]
pub(crate) struct Correlation {
    to_old: HashMap<usize, usize>,
    /// Statics with several candidates among the older ones.
    ambiguous: HashMap<usize, Vec<usize>>,
    /// Lambdas of the older object that the newer one replaced by others.
    pub(crate) left: Vec<String>,
}

impl Correlation {
    pub(crate) fn old(&self, new: usize) -> Option<usize> {
        self.to_old.get(&new).copied()
    }

    pub(crate) fn candidates(&self, new: usize) -> Option<&[usize]> {
        self.ambiguous.get(&new).map(Vec::as_slice)
    }

    /// Makes a symbol of the newer object a new one.
    pub(crate) fn separate(&mut self, new: usize) {
        self.to_old.remove(&new);
        self.ambiguous.remove(&new);
    }

    /// Returns the symbols of the newer object that have one of the older.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.to_old.iter().map(|(new, old)| (*new, *old))
    }

    /// Returns the static variables that have another size in `new`, each with that of `old`.
    pub(crate) fn resized(&self, old: &Object<'_>, new: &Object<'_>) -> Vec<(usize, usize)> {
        let is_writable = |object: &Object<'_>, symbol: usize| {
            let Home::Section(section) = object.symbols[symbol].home else { return false };
            let (symbol, nature) = (&object.symbols[symbol], object.sections[section].nature);
            symbol.local && symbol.kind != SymbolType::Section && matches!(nature, Nature::Data | Nature::Zero)
        };
        let differs = |(new_one, old_one): &(usize, usize)| {
            old.symbols[*old_one].size != new.symbols[*new_one].size
                && is_writable(old, *old_one)
                && is_writable(new, *new_one)
        };
        let mut all: Vec<(usize, usize)> = self.pairs().filter(differs).collect();
        all.sort_unstable();
        all
    }

    /// Joins two mappings, newest to middle object (`self`) and middle to oldest (`next`), to one from newest to
    /// oldest.
    pub(crate) fn join(&self, next: &Correlation) -> Correlation {
        let to_old = self.to_old.iter().filter_map(|(new, old)| Some((*new, next.old(*old)?))).collect();
        Correlation { to_old, ..Correlation::default() }
    }

    /// Pairs the symbols of `new` with those of `old`. Closures and scopes are those of the older object, then of the newer one.
    pub(crate) fn between(old: &Object<'_>, new: &Object<'_>, closures: [&Closures; 2], scopes: [&Scopes; 2]) -> Self {
        let mut found = Correlation::default();
        let mut classes = Classes::between((old, closures[0]), (new, closures[1]));
        found.left = std::mem::take(&mut classes.left);
        found.pair_names(old, new, &classes);
        found.pair_clones(old, new, &classes);
        found.pair_unnamed(old, new, &classes);
        found.pair_initialisers(old, new);
        found.pair_numbered(old, new, scopes);
        found.pair_same_locals(old, new, &classes);
        found.pair_constants(old, new);
        found
    }

    /// Pairs constants of several candidates by their contents: constants with the same bytes are interchangeable. One
    /// without an equal is new.
    fn pair_constants(&mut self, old: &Object<'_>, new: &Object<'_>) {
        let is_constant = |index: &usize| plain_constant(new, *index).is_some();
        let open: Vec<usize> = self.ambiguous.keys().copied().filter(is_constant).collect();
        for index in open {
            let olds = self.ambiguous.remove(&index).unwrap_or_default();
            let equal = olds.into_iter().find(|one| plain_constant(old, *one) == plain_constant(new, index));
            self.to_old.extend(equal.map(|one| (index, one)));
        }
    }

    fn pair_names(&mut self, old: &Object<'_>, new: &Object<'_>, classes: &Classes) {
        let mut by_name: HashMap<(&str, Class), usize> = HashMap::new();
        for (index, class) in defined(old) {
            let symbol = &old.symbols[index];
            let by_number = classes.is_old(index) || class != Class::Code && is_numbered_local(symbol.name);
            if !by_number && (class == Class::Code || !symbol_names::is_numbered(symbol.name)) {
                by_name.insert((symbol.name, class), index);
            }
        }
        for (index, class) in defined(new).filter(|(index, _)| !classes.is_new(*index)) {
            if let Some(&other) = by_name.get(&(new.symbols[index].name, class)) {
                self.to_old.insert(index, other);
            }
        }
    }

    /// Pairs a clone whose number changed, when it is the only one of its kind on both sides.
    fn pair_clones(&mut self, old: &Object<'_>, new: &Object<'_>, classes: &Classes) {
        let taken: BTreeSet<usize> = self.to_old.values().copied().collect();
        let mut left: BTreeMap<(&str, String), Candidates> = BTreeMap::new();
        for (index, symbol) in old.functions().filter(|(i, _)| !taken.contains(i) && !classes.is_old(*i)) {
            left.entry(symbol_names::clone_key(symbol.name)).or_default().0.push(index);
        }
        for (index, symbol) in new.functions().filter(|(i, _)| !self.to_old.contains_key(i) && !classes.is_new(*i)) {
            left.entry(symbol_names::clone_key(symbol.name)).or_default().1.push(index);
        }
        for (olds, news) in left.values() {
            if let ([one], [other]) = (olds.as_slice(), news.as_slice()) {
                self.to_old.insert(*other, *one);
            }
        }
    }

    /// Pairs symbols whose name has the number of a lambda, where the lambda is paired.
    fn pair_unnamed(&mut self, old: &Object<'_>, new: &Object<'_>, classes: &Classes) {
        let mut taken: BTreeSet<usize> = self.to_old.values().copied().collect();
        for (index, olds) in classes.candidates() {
            let same = |one: &&usize| class(old, **one) == class(new, index) && !taken.contains(*one);
            let olds: Vec<usize> = olds.iter().filter(same).copied().collect();
            match olds.as_slice() {
                [] => {}
                [_, _, ..] if class(new, index) != Some(Class::Code) => drop(self.ambiguous.insert(index, olds)),
                [one, ..] => {
                    taken.insert(*one);
                    self.to_old.insert(index, *one);
                }
            }
        }
    }

    /// Pairs the functions that initialise a unit's static objects: their name is that of the first global, which may
    /// be new.
    fn pair_initialisers(&mut self, old: &Object<'_>, new: &Object<'_>) {
        let of = |object: &Object<'_>, kind: &str| {
            let all =
                object.functions().filter(|(_, s)| symbol_names::initialiser_kind(s.name) == kind && s.name != kind);
            all.map(|(index, _)| index).collect::<Vec<_>>()
        };
        for kind in ["_GLOBAL__sub_I_", "_GLOBAL__sub_D_"] {
            if let ([one], [other]) = (of(old, kind).as_slice(), of(new, kind).as_slice()) {
                self.to_old.insert(*other, *one);
            }
        }
    }

    /// Pairs static locals of one name in one function that equal code did not distinguish: by the order in the source,
    /// if all exist on both sides with the same sizes.
    fn pair_same_locals(&mut self, old: &Object<'_>, new: &Object<'_>, classes: &Classes) {
        let taken: BTreeSet<usize> = self.to_old.values().copied().collect();
        let mut left: BTreeMap<(String, Class), Candidates> = BTreeMap::new();
        let local = |object: &Object<'_>, index: usize| {
            let code = class(object, index) == Some(Class::Code);
            local_key(object.symbols[index].name).filter(|_| !code)
        };
        for (index, class) in defined(old).filter(|(i, _)| !taken.contains(i) && !classes.is_old(*i)) {
            let Some(key) = local(old, index) else { continue };
            left.entry((key, class)).or_default().0.push(index);
        }
        for (index, class) in defined(new).filter(|(i, _)| !self.to_old.contains_key(i) && !classes.is_new(*i)) {
            let Some(key) = local(new, index) else { continue };
            left.entry((key, class)).or_default().1.push(index);
        }
        for (olds, news) in left.into_values().filter(|(olds, news)| !olds.is_empty() && !news.is_empty()) {
            let known = |object: &Object<'_>, all: &[usize]| -> BTreeSet<(String, u64)> {
                all.iter().map(|s| (object.symbols[*s].name.to_owned(), object.symbols[*s].size)).collect()
            };
            let alike = known(old, &olds) == known(new, &news);
            for &index in &news {
                let same = |one: &&usize| old.symbols[**one].name == new.symbols[index].name;
                match olds.iter().find(same).filter(|_| alike).or(olds.first().filter(|_| olds.len() + news.len() == 2))
                {
                    Some(one) => {
                        self.ambiguous.remove(&index);
                        self.to_old.insert(index, *one);
                    }
                    None => drop(self.ambiguous.insert(index, olds.clone())),
                }
            }
        }
    }

    fn pair_numbered(&mut self, old: &Object<'_>, new: &Object<'_>, scopes: [&Scopes; 2]) {
        self.pair_by_equal_code(old, new);
        let (old_users, new_users) = (users(old), users(new));
        let taken: BTreeSet<usize> = self.to_old.values().copied().collect();
        let open = |object: &Object<'_>, index: usize| {
            let name = object.symbols[index].name;
            symbol_names::is_numbered(name) && !symbol_names::is_anonymous(name)
        };
        let mut left: BTreeMap<(&str, Class), Candidates> = BTreeMap::new();
        for (index, class) in defined(old).filter(|(i, c)| *c != Class::Code && open(old, *i) && !taken.contains(i)) {
            left.entry((symbol_names::stem(old.symbols[index].name), class)).or_default().0.push(index);
        }
        let unpaired = |i: &usize, c: &Class| *c != Class::Code && open(new, *i) && !self.to_old.contains_key(i);
        for (index, class) in defined(new).filter(|(i, c)| unpaired(i, c)).collect::<Vec<_>>() {
            left.entry((symbol_names::stem(new.symbols[index].name), class)).or_default().1.push(index);
        }
        let declares = |object: &Object<'_>, scopes: &Scopes, index: usize| match object.symbols[index].home {
            Home::Section(section) => scopes.at(section, object.symbols[index].value).map(str::to_owned),
            _ => None,
        };
        let is_declared_alike = |one: usize, other: usize| {
            let scope = declares(old, scopes[0], one);
            scope.is_some() && scope == declares(new, scopes[1], other)
        };
        for (olds, news) in left.into_values() {
            self.pair_by_users(&olds, &news, [&old_users, &new_users], &is_declared_alike);
        }
    }

    /// Pairs variables through equal code, which refers to the same symbols in the same order.
    fn pair_by_equal_code(&mut self, old: &Object<'_>, new: &Object<'_>) {
        let mut votes: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for (index, function) in new.functions() {
            let Some(other) = self.old(index) else { continue };
            let pairs = equal_code_sites(old, &old.symbols[other], new, function);
            for (one, two) in pairs {
                let (Some(from), Some(to)) = (static_at(old, one), static_at(new, two)) else { continue };
                let stems = (variable_stem(old.symbols[from.0].name), variable_stem(new.symbols[to.0].name));
                if from.1 == to.1 && stems.0 == stems.1 && class(old, from.0) == class(new, to.0) {
                    votes.entry(to.0).or_default().insert(from.0);
                }
            }
        }
        for (index, found) in votes {
            match found.iter().collect::<Vec<_>>().as_slice() {
                [one] => drop(self.to_old.insert(index, **one)),
                _ => drop(self.ambiguous.insert(index, found.into_iter().collect())),
            }
        }
    }

    /// Pairs variables that one function uses; of several, those that one function declares.
    fn pair_by_users(
        &mut self,
        olds: &[usize],
        news: &[usize],
        [old_users, new_users]: [&Users; 2],
        is_declared_alike: &dyn Fn(usize, usize) -> bool,
    ) {
        let none = BTreeSet::new();
        let shares = |old: usize, new: usize| {
            let (a, b) = (old_users.get(&old).unwrap_or(&none), new_users.get(&new).unwrap_or(&none));
            a.intersection(b).next().is_some() || a.is_empty() || b.is_empty()
        };
        for &new in news {
            let related: Vec<usize> = olds.iter().copied().filter(|old| shares(*old, new)).collect();
            match related.as_slice() {
                [] => {}
                [one] if news.iter().filter(|n| shares(*one, **n)).count() == 1 => {
                    self.to_old.insert(new, *one);
                }
                _ => {
                    let mut alike = related.iter().filter(|old| is_declared_alike(**old, new));
                    let is_only = |old: usize| news.iter().filter(|new| is_declared_alike(old, **new)).count() == 1;
                    match (alike.next(), alike.next()) {
                        (Some(&one), None) if is_only(one) => {
                            self.ambiguous.remove(&new);
                            self.to_old.insert(new, one);
                        }
                        _ => drop(self.ambiguous.insert(new, related)),
                    }
                }
            }
        }
    }
}

/// Returns true if an object has several statics that only a number of the compiler tells apart.
pub(crate) fn has_namesakes(object: &Object<'_>) -> bool {
    let names = defined(object).filter(|(_, class)| *class != Class::Code).map(|(index, _)| object.symbols[index].name);
    let numbered = names.filter(|name| symbol_names::is_numbered(name) && !symbol_names::is_anonymous(name));
    let mut stems = BTreeSet::new();
    numbered.map(symbol_names::stem).any(|stem| !stems.insert(stem))
}

/// Returns the bytes of a constant that only its unit can reach and that refers to nothing.
pub(crate) fn plain_constant<'a>(object: &Object<'a>, index: usize) -> Option<&'a [u8]> {
    let symbol = &object.symbols[index];
    let Home::Section(section) = symbol.home else { return None };
    let section = &object.sections[section];
    let (start, end) = (symbol.value, symbol.value.checked_add(symbol.size)?);
    let refers = section.relocations.iter().any(|reloc| (start..end).contains(&reloc.offset));
    let is_plain = symbol.local && section.nature == Nature::Constant && !refers;
    section.bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?).filter(|_| is_plain)
}

/// Returns the name of a static local of C++ (or of its guard) without numbers; `None` for every other name.
fn local_key(name: &str) -> Option<String> {
    if !name.starts_with("_ZZ") && !name.starts_with("_ZGVZ") {
        return None;
    }
    Some(unnamed_types::Name::parse(name).map_or_else(|| readable(name).into_owned(), |name| name.without_numbers()))
}

/// Returns true if a number distinguishes a static local from others of its name: `_ZZ1fvE1n_0`.
fn is_numbered_local(name: &str) -> bool {
    local_key(name).is_some()
}

fn variable_stem(name: &str) -> Cow<'_, str> {
    local_key(name).map_or(Cow::Borrowed(symbol_names::stem(name)), Cow::Owned)
}

/// Kinds of symbols; two symbols of different kinds are never a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Class {
    Code,
    Variable,
    ThreadLocal,
}

fn class(object: &Object<'_>, index: usize) -> Option<Class> {
    let symbol = &object.symbols[index];
    let section = match symbol.home {
        Home::Section(section) => &object.sections[section],
        Home::Common => return Some(Class::Variable),
        _ => return None,
    };
    match (symbol.kind, section.nature) {
        (SymbolType::Section, _) | (_, Nature::Aside | Nature::Unwind | Nature::Exceptions) => None,
        (SymbolType::Function | SymbolType::Indirect, _) => Some(Class::Code),
        (SymbolType::Tls, _) => Some(Class::ThreadLocal),
        (SymbolType::Other, Nature::Text) => Some(Class::Code),
        (SymbolType::Other | SymbolType::Object, _) => Some(Class::Variable),
    }
}

/// Returns the named definitions of an object.
fn defined<'o>(object: &'o Object<'_>) -> impl Iterator<Item = (usize, Class)> + 'o {
    let named = |index: usize| {
        let name = object.symbols[index].name;
        !name.is_empty() && !name.starts_with(".L")
    };
    (0..object.symbols.len()).filter(move |i| named(*i)).filter_map(|i| Some((i, class(object, i)?)))
}

/// Returns the static variable at a site, and the offset of the site in it.
fn static_at(object: &Object<'_>, site: Site<'_>) -> Option<(usize, i64)> {
    let Site::Inside { section, offset, .. } = site else { return None };
    let owner = object.owner(section, offset)?;
    let symbol = &object.symbols[owner];
    let within = offset.wrapping_sub(symbol.value as i64);
    let fits = u64::try_from(within).is_ok_and(|w| w < symbol.size.max(1));
    (symbol.local && fits && !symbol_names::is_anonymous(symbol.name)).then_some((owner, within))
}

/// Returns the sites that two functions refer to, pair by pair, if their code is equal except at relocated places.
fn equal_code_sites<'o>(
    old: &Object<'o>,
    old_function: &crate::object_file::Symbol<'o>,
    new: &Object<'o>,
    new_function: &crate::object_file::Symbol<'o>,
) -> Vec<(Site<'o>, Site<'o>)> {
    let span = |object: &Object<'o>, f: &crate::object_file::Symbol<'o>| match f.home {
        Home::Section(section) => {
            let end = f.value.checked_add(f.size).filter(|end| *end <= object.sections[section].bytes.len() as u64)?;
            Some((section, f.value, end))
        }
        _ => None,
    };
    let (Some(a), Some(b)) = (span(old, old_function), span(new, new_function)) else { return Vec::new() };
    if a.2 - a.1 != b.2 - b.1 {
        return Vec::new();
    }
    let relocations = |object: &Object<'o>, (section, start, end): (usize, u64, u64)| {
        let all = object.sections[section].relocations.iter();
        all.filter(|r| (start..end).contains(&r.offset)).copied().collect::<Vec<_>>()
    };
    let (ours, theirs) = (relocations(old, a), relocations(new, b));
    // Within one section the assembler resolves calls itself: those places have a relocation in one build only.
    let at: HashMap<u64, _> = theirs.iter().map(|r| (r.offset - b.1, r)).collect();
    let holes: BTreeSet<u64> = ours
        .iter()
        .map(|r| r.offset - a.1)
        .chain(theirs.iter().map(|r| r.offset - b.1))
        .flat_map(|at| at..at.saturating_add(4))
        .collect();
    let code = |object: &Object<'o>, (section, start, end): (usize, u64, u64)| {
        &object.sections[section].bytes[start as usize..end as usize]
    };
    let equal =
        code(old, a).iter().zip(code(new, b)).enumerate().all(|(i, (x, y))| x == y || holes.contains(&(i as u64)));
    if !equal {
        return Vec::new();
    }
    ours.iter().filter_map(|r| Some((old.site(r), new.site(at.get(&(r.offset - a.1))?)))).collect()
}

type Users = HashMap<usize, BTreeSet<String>>;

/// Returns the stems of the functions (and names of the data) that refer to each static variable.
fn users(object: &Object<'_>) -> Users {
    let mut out = Users::new();
    for (index, section) in object.sections.iter().enumerate() {
        for reloc in &section.relocations {
            let Some((variable, _)) = static_at(object, object.site(reloc)) else { continue };
            let Some(user) = object.owner(index, reloc.offset as i64) else { continue };
            out.entry(variable).or_default().insert(symbol_names::stem(object.symbols[user].name).to_owned());
        }
    }
    out
}
