//! Walk over pairs of types, one of each side, that collects the differences.

use super::Compared;
use super::dwarf::{DebugInfoError, Die, NESTING_MAX, Side, TypeKey};
use super::enumerations;
use super::references::{References, references};
use super::shape::{Count, Member, Shape};
use crate::Refusal;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt::Write;
use stillpoint_patch_format::TypeFact;

/// Limit of differences of one type in a message.
const DIFFERENCES_SHOWN: usize = 8;

/// A pair of types that is not compared yet.
struct Pair {
    label: String,
    old: Die,
    new: Die,
}

/// A comparison in progress.
pub(super) struct Comparison<'c, 'a> {
    pub(super) old: &'c Side<'a>,
    pub(super) new: &'c Side<'a>,
    seen: HashSet<(Die, Die)>,
    queue: VecDeque<Pair>,
    /// True while the compared types are reached from the changed functions, and so are facts.
    reached: bool,
    facts: BTreeMap<String, TypeFact>,
    notes: BTreeSet<String>,
    differences: BTreeMap<String, Vec<String>>,
    /// Members that structures gained, of those in `differences` where nothing else changed.
    added: BTreeMap<String, Vec<String>>,
    variables: BTreeMap<String, (String, String)>,
    /// Variables of which new code has a copy.
    copied: &'c [&'c str],
    signatures: Vec<Refusal>,
    renumbered: BTreeMap<String, BTreeSet<String>>,
}

impl<'c, 'a> Comparison<'c, 'a> {
    pub(super) fn new(old: &'c Side<'a>, new: &'c Side<'a>, copied: &'c [&'c str]) -> Self {
        Comparison {
            old,
            new,
            seen: HashSet::new(),
            queue: VecDeque::new(),
            reached: true,
            facts: BTreeMap::new(),
            notes: BTreeSet::new(),
            differences: BTreeMap::new(),
            added: BTreeMap::new(),
            variables: BTreeMap::new(),
            copied,
            signatures: Vec::new(),
            renumbered: BTreeMap::new(),
        }
    }

    /// Compares all types that cross a change of `functions`.
    pub(super) fn run(&mut self, functions: &BTreeMap<&str, &str>) -> Result<(), DebugInfoError> {
        let (mut old, mut new) = (References::default(), References::default());
        for (after, shipped) in functions {
            references(self.old, shipped, &mut old)?;
            references(self.new, after, &mut new)?;
        }
        // For several of one name in one function, the code that refers to them decides, not this comparison.
        old.statics.retain(|_, all| all.len() == 1);
        new.statics.retain(|_, all| all.len() == 1);
        for key in old.types.keys().chain(new.types.keys()).filter(|key| is_one(key)).collect::<BTreeSet<_>>() {
            let old = old.types.get(key).or_else(|| self.old.types.get(key));
            let new = new.types.get(key).or_else(|| self.new.types.get(key));
            if let (Some(&old), Some(&new)) = (old, new) {
                self.named(key, old, new)?;
            }
        }
        self.all_variables(&old.statics, &new.statics)?;
        self.all_variables(&self.old.variables, &self.new.variables)?;
        self.drain()?;
        self.reached = false;
        let keys: BTreeSet<&TypeKey> = self.old.types.keys().filter(|key| is_one(key)).collect();
        for key in keys {
            if let (Some(&old), Some(&new)) = (self.old.types.get(key), self.new.types.get(key)) {
                self.named(key, old, new)?;
            }
        }
        self.drain()
    }

    /// Returns the facts, or every refusal.
    pub(super) fn finish(mut self, unit: &str) -> Result<Compared, Vec<Refusal>> {
        let types = self.differences.into_iter().map(|(type_name, all)| {
            let mut what = all[..all.len().min(DIFFERENCES_SHOWN)].join("; ");
            if all.len() > DIFFERENCES_SHOWN {
                _ = write!(what, "; and {} more", all.len() - DIFFERENCES_SHOWN);
            }
            let added = self.added.remove(&type_name);
            Refusal::TypeLayoutChanged { type_name, what, added }
        });
        let variables = self.variables.into_iter().map(|(object, (before, after))| Refusal::VariableChanged {
            unit: unit.to_owned(),
            object,
            before,
            after,
            copyable: false,
        });
        let refusals: Vec<Refusal> = types.chain(variables).chain(self.signatures).collect();
        match refusals.is_empty() {
            true => Ok(Compared {
                facts: self.facts.into_values().collect(),
                notes: self.notes.into_iter().collect(),
                renumbered: self.renumbered,
            }),
            false => Err(refusals),
        }
    }

    pub(super) fn refuse(&mut self, refusal: Refusal) {
        self.signatures.push(refusal);
    }

    fn differ(&mut self, label: &str, what: String) {
        self.differences.entry(label.to_owned()).or_default().push(what);
    }

    /// Compares two types of one name. For a typedef, compares the types that it names.
    fn named(&mut self, key: &TypeKey, old: Die, new: Die) -> Result<(), DebugInfoError> {
        if !self.same(Some(old), Some(new), &key.name, 0)? {
            let (before, after) = (shown(self.old, key, old)?, shown(self.new, key, new)?);
            let label = if key.tag { before.clone() } else { format!("typedef {}", key.name) };
            self.differ(&label, format!("was {before}, is {after}"));
        }
        Ok(())
    }

    fn all_variables(
        &mut self,
        old: &HashMap<String, Vec<Die>>,
        new: &HashMap<String, Vec<Die>>,
    ) -> Result<(), DebugInfoError> {
        let names: BTreeSet<&String> = old.keys().filter(|name| new.contains_key(*name)).collect();
        let is_copied = |name: &str| self.copied.iter().any(|copied| name.rsplit("::").next() == Some(*copied));
        for name in names.into_iter().filter(|name| !is_copied(name)).collect::<Vec<_>>() {
            let (old, new) = (definition(self.old, &old[name])?, definition(self.new, &new[name])?);
            if self.old.is_constant(old)? && self.new.is_constant(new)? {
                // Constant data is part of the patch; the types of its elements are still compared by name.
                continue;
            }
            if !self.same(old, new, name, 0)? {
                let pair = (self.old.describe(old)?, self.new.describe(new)?);
                self.variables.insert(name.clone(), pair);
            }
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), DebugInfoError> {
        while let Some(pair) = self.queue.pop_front() {
            match self.old.shape(Some(pair.old))? {
                Shape::Enumeration { .. } => self.enumerations(&pair)?,
                _ => self.aggregates(&pair)?,
            }
        }
        Ok(())
    }

    /// Returns true if two types are the same for live data. Named types with equal names count as the same here and
    /// are compared separately; so are anonymous ones, as `label`.
    pub(super) fn same(
        &mut self,
        old: Option<Die>,
        new: Option<Die>,
        label: &str,
        depth: usize,
    ) -> Result<bool, DebugInfoError> {
        if depth > NESTING_MAX {
            return Err(DebugInfoError::Nesting);
        }
        Ok(match (self.old.shape(old)?, self.new.shape(new)?) {
            (Shape::Pointer { tag, to }, Shape::Pointer { tag: new_tag, to: new_to }) => {
                let untyped = self.old.shape(to)? == Shape::Void || self.new.shape(new_to)? == Shape::Void;
                tag == new_tag && (untyped || self.same(to, new_to, label, depth + 1)?)
            }
            (Shape::Member { class, to }, Shape::Member { class: new_class, to: new_to }) => {
                self.same(class, new_class, label, depth + 1)? && self.same(to, new_to, label, depth + 1)?
            }
            (
                Shape::Aggregate { union, die, name },
                Shape::Aggregate { union: new_union, die: new_die, name: new_name },
            ) => {
                if union != new_union || name != new_name {
                    return Ok(false);
                }
                let label = name.map_or(Ok(label.to_owned()), |name| self.label(die, &name))?;
                self.push(label, die, new_die)
            }
            (Shape::Enumeration { die, name }, Shape::Enumeration { die: new_die, name: new_name }) => {
                if name != new_name {
                    return Ok(false);
                }
                let label = name.map_or(Ok(label.to_owned()), |name| self.label(die, &name))?;
                self.push(label, die, new_die)
            }
            (Shape::Array { element, counts }, Shape::Array { element: new_element, counts: new_counts }) => {
                counts == new_counts && self.same(element, new_element, &format!("{label}[]"), depth + 1)?
            }
            (Shape::Function { die }, Shape::Function { die: new_die }) => {
                self.same_call(die, new_die, label, depth + 1)?
            }
            (old, new) => old == new,
        })
    }

    /// Returns true if two functions have the same parameters and result.
    pub(super) fn same_call(&mut self, old: Die, new: Die, label: &str, depth: usize) -> Result<bool, DebugInfoError> {
        let ((before, open), (after, new_open)) = (self.old.parameters(old)?, self.new.parameters(new)?);
        let mut alike = before.len() == after.len() && open == new_open;
        for (before, after) in before.into_iter().zip(after) {
            alike &= self.same(before, after, label, depth + 1)?;
        }
        if !alike {
            alike = self.old.has_no_prototype(old)? && self.new.is_called_without_prototype(new)?
                || self.new.has_no_prototype(new)? && self.old.is_called_without_prototype(old)?;
        }
        let (before, after) = (self.old.type_of(old)?, self.new.type_of(new)?);
        Ok(self.same(before, after, label, depth + 1)? && alike)
    }

    fn push(&mut self, label: String, old: Die, new: Die) -> bool {
        if self.seen.insert((old, new)) {
            self.queue.push_back(Pair { label, old, new });
        }
        true
    }

    /// Returns `struct s`, or the name of the typedef alone for an anonymous structure.
    fn label(&self, die: Die, name: &str) -> Result<String, DebugInfoError> {
        let text = self.old.describe(Some(die))?;
        Ok(if text.ends_with("(anonymous)") { name.to_owned() } else { text })
    }

    /// Returns the definitions of both entries; `None` when a side has only the name.
    fn complete(&self, pair: &Pair) -> Result<Option<(Die, Die)>, DebugInfoError> {
        let find = |side: &Side<'_>, die: Die| -> Result<Option<Die>, DebugInfoError> {
            if side.extent(die)?.2 {
                return Ok(Some(die));
            }
            let name = side.full_name(die)?.unwrap_or_default();
            Ok(side.types.get(&TypeKey { tag: true, name }).copied())
        };
        Ok(find(self.old, pair.old)?.zip(find(self.new, pair.new)?))
    }

    fn aggregates(&mut self, pair: &Pair) -> Result<(), DebugInfoError> {
        let Some((old, new)) = self.complete(pair)? else { return Ok(()) };
        let label = &pair.label;
        let (old_members, new_members) = (self.old.members(old)?, self.new.members(new)?);
        let by_name: HashMap<&str, &Member> = new_members.iter().map(|m| (m.name.as_str(), m)).collect();
        let (mut found, mut added, mut only_moved) = (Vec::new(), Vec::new(), true);
        for member in &old_members {
            let change = match by_name.get(member.name.as_str()) {
                None => Some(format!("member `{}` at offset {} was removed", member.name, member.place)),
                Some(after) => self.member(label, member, after)?,
            };
            only_moved &= change.as_ref().is_none_or(|change| change.contains("` moved from offset "));
            found.extend(change);
        }
        let ((size, align, _), (new_size, new_align, _)) = (self.old.extent(old)?, self.new.extent(new)?);
        let is_union = matches!(self.old.shape(Some(old))?, Shape::Aggregate { union: true, .. });
        let known: HashSet<&str> = old_members.iter().map(|m| m.name.as_str()).collect();
        for member in new_members.iter().filter(|m| !known.contains(m.name.as_str())) {
            if is_union && size == new_size {
                self.notes.insert(format!("{label}: alternative `{}` added", member.name));
            } else {
                found.push(format!("member `{}` added at offset {}", member.name, member.place));
                added.push(member.name.clone());
            }
        }
        // the structures around it have other sizes and offsets, and gain nothing themselves
        if only_moved && !is_union {
            self.added.insert(label.clone(), added);
        }
        if size != new_size {
            found.push(format!("size changed from {size} to {new_size} bytes"));
        }
        if align != new_align {
            let text = |align: Option<u64>| align.map_or("its default".to_owned(), |n| n.to_string());
            found.push(format!("alignment changed from {} to {}", text(align), text(new_align)));
        }
        if self.old.virtual_functions(old)? != self.new.virtual_functions(new)? {
            found.push("its table of virtual functions changed".to_owned());
        }
        self.settle(label, size, old_members.len(), found);
        Ok(())
    }

    /// Returns the change of one member, if any.
    fn member(&mut self, label: &str, old: &Member, new: &Member) -> Result<Option<String>, DebugInfoError> {
        let name = &old.name;
        if old.place != new.place {
            // If the types changed too, the move still breaks live data first.
            self.same(old.ty, new.ty, &format!("{label}.{name}"), 0)?;
            return Ok(Some(format!("member `{name}` moved from offset {} to {}", old.place, new.place)));
        }
        if old.bits != new.bits {
            let text = |bits: Option<u64>| bits.map_or("all".to_owned(), |n| n.to_string());
            return Ok(Some(format!("member `{name}` changed from {} to {} bits", text(old.bits), text(new.bits))));
        }
        if self.same(old.ty, new.ty, &format!("{label}.{name}"), 0)? {
            return Ok(None);
        }
        let (before, after) = (self.old.describe(old.ty)?, self.new.describe(new.ty)?);
        Ok(Some(format!("member `{name}` at offset {} changed from {before} to {after}", old.place)))
    }

    fn enumerations(&mut self, pair: &Pair) -> Result<(), DebugInfoError> {
        let Some((old, new)) = self.complete(pair)? else { return Ok(()) };
        let label = &pair.label;
        let (before, after) = (self.old.enumerators(old)?, self.new.enumerators(new)?);
        let values: HashMap<&str, i128> = after.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let mut found = Vec::new();
        for (name, value) in &before {
            match values.get(name.as_str()) {
                None => found.push(format!("enumerator `{name}` = {value} was removed")),
                Some(now) if now != value => found.push(format!("enumerator `{name}` changed from {value} to {now}")),
                Some(_) => {}
            }
        }
        let known: HashSet<&str> = before.iter().map(|(name, _)| name.as_str()).collect();
        for (name, value) in after.iter().filter(|(name, _)| !known.contains(name.as_str())) {
            self.notes.insert(format!("{label}: enumerator `{name}` = {value} added"));
        }
        let (size, new_size) = (self.old.extent(old)?.0, self.new.extent(new)?.0);
        if size != new_size {
            found.push(format!("size changed from {size} to {new_size} bytes"));
        } else if !found.is_empty() {
            self.renumbered(label, old, &mut found)?;
        }
        self.settle(label, size, before.len(), found);
        Ok(())
    }

    /// Permits other values of an enumeration of C that no data has, and turns the differences into notes.
    fn renumbered(&mut self, label: &str, old: Die, found: &mut Vec<String>) -> Result<(), DebugInfoError> {
        let Shape::Enumeration { name: Some(name), .. } = self.old.shape(Some(old))? else { return Ok(()) };
        if self.old.is_cxx(old.unit()) || label != format!("enum {name}") && label != name {
            return Ok(());
        }
        let uses = enumerations::uses(self.old, &name)?;
        if let Some(data) = uses.data {
            found.push(format!("{data} may hold it"));
            return Ok(());
        }
        for what in found.drain(..) {
            let note = "no data has this type; integers that hold its values were not looked for";
            self.notes.insert(format!("{label}: {what}: {note}"));
        }
        self.renumbered.entry(name).or_default().extend(uses.functions);
        Ok(())
    }

    fn settle(&mut self, label: &str, size: u64, members: usize, found: Vec<String>) {
        if self.reached {
            let members = u32::try_from(members).unwrap_or(u32::MAX);
            self.facts.insert(label.to_owned(), TypeFact { name: label.to_owned(), size, members });
        }
        found.into_iter().for_each(|what| self.differ(label, what));
    }
}

/// Returns true if only one type has the name: all lambdas of a function share a name, and so do templates made for
/// them.
fn is_one(key: &TypeKey) -> bool {
    !key.name.contains("<lambda") && !key.name.contains("(lambda at ")
}

/// Returns the type of a variable: that of its definition if there is one, as a declaration may have an array without
/// size.
fn definition(side: &Side<'_>, dies: &[Die]) -> Result<Option<Die>, DebugInfoError> {
    let (mut open, mut closed) = (None, None);
    for &die in dies {
        let ty = side.type_of(die)?;
        let is_open = matches!(side.shape(ty)?, Shape::Array { counts, .. } if counts.contains(&Count::Open));
        *(if is_open { &mut open } else { &mut closed }) = ty;
    }
    Ok(closed.or(open))
}

/// Returns the text of a type for a message: for a typedef, the type that it names.
fn shown(side: &Side<'_>, key: &TypeKey, die: Die) -> Result<String, DebugInfoError> {
    let ty = match side.shape(Some(die))? {
        Shape::Aggregate { die, .. } | Shape::Enumeration { die, .. } => Some(die),
        _ if key.tag => Some(die),
        _ => side.type_of(die)?,
    };
    side.describe(ty)
}
