//! The decision which objects of a database are left out, from its catalogs and the patterns; data only.
//!
//! - A table, view or sequence is selected by its name. A partition and a table that inherits follow the table at their top, and
//!   a sequence that belongs to a column follows its table.
//! - Functions, types and the like of a schema of which something is selected are selected too, unless they need something that
//!   is left out. Of other schemas, those that selected objects need are.
//! - A selected table or view that needs something that is left out is a [`Problem`].

use super::Selection;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Number of a catalog, and of an object in it.
pub(crate) type Object = (u32, u32);

/// Numbers of catalogs, the same in all versions of the server.
pub(crate) const CLASS: u32 = 1259;
pub(crate) const TYPE: u32 = 1247;
pub(crate) const NAMESPACE: u32 = 2615;
const CAST: u32 = 2605;
const TRANSFORM: u32 = 3576;
/// Schema that a server makes with each database.
const FIRST_SCHEMA: &str = "public";

/// A table, view, materialized view, foreign table or sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Relation {
    /// Its number in `pg_class`.
    pub(crate) oid: u32,
    pub(crate) schema: String,
    pub(crate) name: String,
    /// Kind as in `pg_class.relkind`.
    pub(crate) kind: char,
    /// Numbers of the tables of which it is a partition, or from which it inherits.
    pub(crate) parents: Vec<u32>,
    /// Number of the table to one of whose columns it belongs.
    pub(crate) owner: Option<u32>,
    /// True if an extension made it.
    pub(crate) of_extension: bool,
}

impl Relation {
    /// Name for messages, not quoted.
    pub(crate) fn display(&self) -> String {
        format!("{}.{}", self.schema, self.name)
    }
}

/// A foreign key between two tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForeignKey {
    pub(crate) constraint: u32,
    /// The table that refers, and the one that it refers to.
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// Contents of a database, as its catalogs show them.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// Schemas of the user: number and name.
    pub(crate) schemas: Vec<(u32, String)>,
    pub(crate) relations: Vec<Relation>,
    /// Functions, types and other objects that are in a schema: the object, and the number of the schema.
    pub(crate) objects: Vec<(Object, u32)>,
    /// Objects in no schema that can need others: casts, event triggers, languages and the like.
    pub(crate) global: Vec<Object>,
    /// Objects that are a part of another one, with that one: constraints, defaults, triggers, indexes, row types.
    pub(crate) parts: HashMap<Object, Object>,
    /// Parts whose needs are those of another object, such as foreign keys, which are looked at one by one.
    pub(crate) quiet: HashSet<Object>,
    /// Objects that an extension made.
    pub(crate) members: HashSet<Object>,
    /// Numbers of schemas that extensions are in.
    pub(crate) extension_schemas: HashSet<u32>,
    /// Objects that an object needs; true if it goes with that object (`a` and `i` in `pg_depend`).
    pub(crate) needs: HashMap<Object, Vec<(Object, bool)>>,
    pub(crate) foreign_keys: Vec<ForeignKey>,
}

/// Reason why a selection cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Problem {
    /// A foreign key between a selected table and one that is left out; `from_is_left_out` if it is the one that refers.
    ForeignKey { constraint: u32, from: String, to: String, from_is_left_out: bool },
    /// A selected relation, or a part of it, needs one that is left out.
    Needs { part: Object, of: String, needed: String },
    /// A pattern says otherwise about a partition, an heir or the sequence of a column than about its table.
    Follower { relation: String, of: String, is_selected: bool },
    /// One of the tables from which it inherits is selected, and another one is not.
    Heir { relation: String, selected: String, left_out: String },
    /// A pattern excludes a relation that belongs to an extension.
    OfExtension { relation: String },
}

/// A relation that is left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftRelation {
    pub(crate) relation: Relation,
    /// True if a pattern excludes it; false if no pattern includes it.
    pub(crate) is_excluded: bool,
}

/// Result of the decision.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Decision {
    /// All objects that are left out, with their parts.
    pub(crate) left_out: BTreeSet<Object>,
    pub(crate) relations: Vec<LeftRelation>,
    /// Schemas, functions, types and the like that are left out.
    pub(crate) others: Vec<Object>,
    pub(crate) problems: Vec<Problem>,
    /// Patterns that select nothing.
    pub(crate) unmatched: Vec<String>,
}

/// Decides what is left out.
pub(crate) fn decide(contents: &Contents, selection: &Selection) -> Decision {
    let by_number: HashMap<u32, &Relation> =
        contents.relations.iter().map(|relation| (relation.oid, relation)).collect();
    let mut decider = Decider {
        contents,
        selection,
        by_number,
        selected: HashSet::new(),
        schemas: HashSet::new(),
        needed: HashSet::new(),
        reached: HashMap::new(),
        problems: BTreeSet::new(),
    };
    decider.select_relations();
    decider.check_relations();
    decider.finish()
}

struct Decider<'c> {
    contents: &'c Contents,
    selection: &'c Selection,
    by_number: HashMap<u32, &'c Relation>,
    /// Numbers of selected relations.
    selected: HashSet<u32>,
    /// Schemas of relations that are selected by their names.
    schemas: HashSet<&'c str>,
    /// Objects of schemas that selected objects need.
    needed: HashSet<Object>,
    /// For each object: a relation that it needs and that is left out.
    reached: HashMap<Object, Option<u32>>,
    problems: BTreeSet<Problem>,
}

impl<'c> Decider<'c> {
    /// Tables of which a relation is a part: those at the top of its parents, or of its owner's.
    fn tops(&self, relation: &'c Relation) -> Vec<&'c Relation> {
        let (mut tops, mut seen, mut left) = (BTreeMap::new(), HashSet::new(), vec![relation]);
        while let Some(next) = left.pop() {
            let above = next.parents.iter().chain(&next.owner);
            let above: Vec<&Relation> = above.filter_map(|oid| self.by_number.get(oid).copied()).collect();
            if above.is_empty() {
                tops.insert(next.oid, next);
            }
            left.extend(above.into_iter().filter(|above| seen.insert(above.oid)));
        }
        tops.into_values().collect()
    }

    fn is_selected_by_name(&self, relation: &Relation) -> bool {
        relation.of_extension || self.selection.includes(relation) && !self.selection.excludes(relation)
    }

    fn select_relations(&mut self) {
        for relation in &self.contents.relations {
            if relation.of_extension && self.selection.excludes_by_name(relation) {
                self.problems.insert(Problem::OfExtension { relation: relation.display() });
            }
            let tops = self.tops(relation);
            let (selected, left_out): (Vec<&Relation>, Vec<&Relation>) =
                tops.into_iter().partition(|top| self.is_selected_by_name(top));
            let is_follower = !relation.parents.is_empty() || relation.owner.is_some();
            if let (Some(selected), Some(left_out)) = (selected.first(), left_out.first()) {
                self.problems.insert(Problem::Heir {
                    relation: relation.display(),
                    selected: selected.display(),
                    left_out: left_out.display(),
                });
            }
            let contradicts = match (selected.first(), left_out.first()) {
                _ if !is_follower => None,
                (Some(top), _) => self.selection.excludes_by_name(relation).then_some(top),
                (None, Some(top)) => {
                    let is_named = self.selection.includes_by_name(relation)
                        || relation.owner.is_none() && self.selection.includes_schema_of(relation);
                    (is_named && !self.selection.excludes(relation)).then_some(top)
                }
                (None, None) => None,
            };
            if let Some(top) = contradicts {
                let is_selected = !selected.is_empty();
                self.problems.insert(Problem::Follower {
                    relation: relation.display(),
                    of: top.display(),
                    is_selected,
                });
            }
            if !selected.is_empty() {
                self.selected.insert(relation.oid);
                self.schemas.extend((!relation.of_extension).then_some(relation.schema.as_str()));
            }
        }
    }

    /// Returns true for a sequence that belongs to no column: it goes with what needs it.
    fn is_free_sequence(relation: &Relation) -> bool {
        relation.kind == 'S' && relation.owner.is_none()
    }

    /// A relation that an object needs, directly or by other objects, and that is left out.
    fn reach(&mut self, object: Object) -> Option<u32> {
        if object.0 == CLASS
            && let Some(relation) = self.by_number.get(&object.1)
        {
            let is_there = self.selected.contains(&object.1) || Self::is_free_sequence(relation);
            return (!is_there).then_some(object.1);
        }
        if self.contents.members.contains(&object) {
            return None;
        }
        if let Some(known) = self.reached.get(&object) {
            return *known;
        }
        // A cycle ends here.
        self.reached.insert(object, None);
        let owner = self.contents.parts.get(&object).copied();
        let of_owner = owner.and_then(|owner| self.reach(owner));
        // A part of a table is judged with it.
        let found = match owner {
            Some(_) if of_owner.is_some() => of_owner,
            Some((CLASS, _)) => None,
            _ => self.needs(object).into_iter().find_map(|(needed, _)| self.reach(needed)),
        };
        self.reached.insert(object, found);
        found
    }

    fn needs(&self, object: Object) -> Vec<(Object, bool)> {
        self.contents.needs.get(&object).cloned().unwrap_or_default()
    }

    /// Records that a selected object needs another one, and all that this one needs.
    fn need(&mut self, object: Object) {
        let mut left = vec![object];
        while let Some(object) = left.pop() {
            match self.by_number.get(&object.1).filter(|_| object.0 == CLASS) {
                Some(relation) if Self::is_free_sequence(relation) => drop(self.selected.insert(object.1)),
                Some(_) => {}
                None if self.contents.members.contains(&object) => {}
                None if self.needed.insert(object) => {
                    left.extend(self.contents.parts.get(&object));
                    left.extend(self.needs(object).into_iter().map(|(needed, _)| needed));
                }
                None => {}
            }
        }
    }

    /// Checks what selected relations need.
    fn check_relations(&mut self) {
        let name = |number: u32| self.by_number.get(&number).map(|relation| relation.display()).unwrap_or_default();
        for key in &self.contents.foreign_keys {
            let is_there = |oid| self.selected.contains(&oid);
            if is_there(key.from) != is_there(key.to) {
                let (constraint, from, to) = (key.constraint, name(key.from), name(key.to));
                let from_is_left_out = !is_there(key.from);
                self.problems.insert(Problem::ForeignKey { constraint, from, to, from_is_left_out });
            }
        }
        let parts = self.contents.parts.iter().map(|(part, owner)| (*part, *owner));
        let whole = self.contents.relations.iter().map(|relation| ((CLASS, relation.oid), (CLASS, relation.oid)));
        let mut all: Vec<(Object, Object)> = parts.chain(whole).collect();
        all.sort_unstable();
        for (part, owner) in all {
            let Some(relation) = self.by_number.get(&owner.1).copied().filter(|_| owner.0 == CLASS) else { continue };
            let is_judged = self.selected.contains(&relation.oid) && !relation.of_extension;
            if !is_judged || self.contents.quiet.contains(&part) {
                continue;
            }
            for (needed, _) in self.needs(part) {
                let is_own = self.contents.parts.get(&needed) == Some(&owner) || needed == owner;
                let is_parent = needed.0 == CLASS && relation.parents.contains(&needed.1);
                match self.reach(needed).filter(|_| !is_own && !is_parent) {
                    Some(missing) => {
                        let needed = self.by_number.get(&missing).map(|it| it.display()).unwrap_or_default();
                        self.problems.insert(Problem::Needs { part, of: relation.display(), needed });
                    }
                    None => self.need(needed),
                }
            }
        }
    }

    /// Decides about everything that is no relation.
    fn finish(mut self) -> Decision {
        let contents = self.contents;
        let mut left_out: BTreeSet<Object> = BTreeSet::new();
        let mut others = Vec::new();
        for object in contents.global.iter().filter(|object| ![CAST, TRANSFORM].contains(&object.0)) {
            match self.reach(*object) {
                Some(_) => others.push(*object),
                None => self.need(*object),
            }
        }
        let is_selected = |name: &str| self.selection.selects_schema(name, self.schemas.contains(name));
        let selected_schemas: HashSet<u32> =
            contents.schemas.iter().filter(|(_, name)| is_selected(name)).map(|(oid, _)| *oid).collect();
        for (object, _) in contents.objects.iter().filter(|(_, schema)| selected_schemas.contains(schema)) {
            if self.reach(*object).is_none() {
                self.need(*object);
            }
        }
        let of_schemas: HashSet<Object> = contents.objects.iter().map(|(object, _)| *object).collect();
        let is_there =
            |needed: &HashSet<Object>, object: &Object| !of_schemas.contains(object) || needed.contains(object);
        for object in contents.global.iter().filter(|object| [CAST, TRANSFORM].contains(&object.0)) {
            let types: Vec<Object> =
                self.needs(*object).into_iter().map(|(needed, _)| needed).filter(|needed| needed.0 == TYPE).collect();
            let is_complete = types.iter().all(|of| is_there(&self.needed, of));
            match self.reach(*object) {
                None if is_complete => self.need(*object),
                _ => others.push(*object),
            }
        }
        let mut schemas_in_use = selected_schemas;
        schemas_in_use.extend(&contents.extension_schemas);
        for (object, schema) in &contents.objects {
            if self.needed.contains(object) || contents.members.contains(object) {
                schemas_in_use.insert(*schema);
            } else {
                others.push(*object);
            }
        }
        let selected: HashSet<&str> = contents
            .relations
            .iter()
            .filter(|relation| self.selected.contains(&relation.oid))
            .map(|relation| relation.schema.as_str())
            .collect();
        for (oid, name) in &contents.schemas {
            let is_used = schemas_in_use.contains(oid) || selected.contains(name.as_str()) || name == FIRST_SCHEMA;
            if !is_used {
                others.push((NAMESPACE, *oid));
            }
        }
        let mut relations = Vec::new();
        for relation in contents.relations.iter().filter(|relation| !self.selected.contains(&relation.oid)) {
            let is_excluded = self.tops(relation).into_iter().chain([relation]).any(|top| self.selection.excludes(top));
            relations.push(LeftRelation { relation: relation.clone(), is_excluded });
            left_out.insert((CLASS, relation.oid));
        }
        left_out.extend(&others);
        self.add_subordinates(&mut left_out);
        let unmatched = self.selection.unmatched(&contents.schemas, &contents.relations);
        others.sort_unstable();
        Decision { left_out, relations, others, problems: self.problems.into_iter().collect(), unmatched }
    }

    /// Adds parts of what is left out, and objects that go with it.
    fn add_subordinates(&self, left_out: &mut BTreeSet<Object>) {
        let contents = self.contents;
        let mut below: HashMap<Object, Vec<Object>> = HashMap::new();
        for (part, owner) in &contents.parts {
            below.entry(*owner).or_default().push(*part);
        }
        let is_decided = |object: &Object| {
            contents.parts.contains_key(object)
                || contents.members.contains(object)
                || object.0 == CLASS && self.by_number.contains_key(&object.1)
                || contents.global.contains(object)
                || self.needed.contains(object)
        };
        for (object, needs) in contents.needs.iter().filter(|(object, _)| !is_decided(object)) {
            for (owner, _) in needs.iter().filter(|(_, goes_with)| *goes_with) {
                below.entry(*owner).or_default().push(*object);
            }
        }
        let mut left: Vec<Object> = left_out.iter().copied().collect();
        while let Some(object) = left.pop() {
            for part in below.get(&object).into_iter().flatten() {
                if left_out.insert(*part) {
                    left.push(*part);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SALES: u32 = 20_000;
    const HR: u32 = 20_001;
    const FUNCTION: u32 = 1255;
    const DEFAULT: u32 = 2604;
    const REWRITE: u32 = 2618;

    fn relation(oid: u32, schema: &str, name: &str, kind: char) -> Relation {
        Relation { oid, schema: schema.into(), name: name.into(), kind, ..Relation::default() }
    }

    /// Two schemas: `sales` with `orders` (1), its partition (2) and a view (3); `hr` with `person` (11) and a sequence (12).
    fn contents() -> Contents {
        let part = Relation { parents: vec![1], ..relation(2, "sales", "orders_1", 'r') };
        Contents {
            schemas: vec![(SALES, "sales".into()), (HR, "hr".into()), (2200, "public".into())],
            relations: vec![
                relation(1, "sales", "orders", 'p'),
                part,
                relation(3, "sales", "seen", 'v'),
                relation(11, "hr", "person", 'r'),
                relation(12, "hr", "numbers", 'S'),
            ],
            objects: vec![((FUNCTION, 100), HR), ((FUNCTION, 101), HR), ((FUNCTION, 102), SALES)],
            ..Contents::default()
        }
    }

    fn selection(include: &[&str], exclude: &[&str]) -> Selection {
        let text = |patterns: &[&str]| patterns.iter().map(|pattern| (*pattern).to_owned()).collect::<Vec<_>>();
        Selection::parse(&text(include), &text(exclude), false).unwrap()
    }

    fn left(decision: &Decision) -> Vec<u32> {
        decision.relations.iter().map(|left| left.relation.oid).collect()
    }

    #[test]
    fn a_schema_is_left_out_with_all_in_it_except_what_is_needed() {
        let mut contents = contents();
        // A default of `orders` calls function 100, and takes numbers of a sequence.
        contents.parts.insert((DEFAULT, 50), (CLASS, 1));
        contents.needs.insert((DEFAULT, 50), vec![((CLASS, 1), true), ((FUNCTION, 100), false), ((CLASS, 12), false)]);
        for selection in [selection(&["sales"], &[]), selection(&[], &["hr"])] {
            let decision = decide(&contents, &selection);
            assert_eq!((left(&decision), &decision.problems), (vec![11], &Vec::new()), "{selection:?}");
            assert_eq!(decision.others, [(FUNCTION, 101)], "the schema has what is needed");
            assert_eq!(decision.relations[0].is_excluded, !selection.excluded().is_empty());
        }
        contents.needs.clear();
        let decision = decide(&contents, &selection(&["sales"], &[]));
        assert_eq!(left(&decision), [11, 12]);
        assert_eq!(decision.others, [(FUNCTION, 100), (FUNCTION, 101), (NAMESPACE, HR)]);
    }

    #[test]
    fn a_partition_follows_its_table_and_is_not_named_alone() {
        let contents = contents();
        assert_eq!(left(&decide(&contents, &selection(&["sales.orders"], &[]))), [3, 11, 12]);
        assert_eq!(left(&decide(&contents, &selection(&[], &["sales.orders"]))), [1, 2]);
        for (include, exclude, is_selected) in [("sales.orders_1", "hr", false), ("sales", "sales.orders_1", true)] {
            let decision = decide(&contents, &selection(&[include], &[exclude]));
            let (relation, of) = ("sales.orders_1".to_owned(), "sales.orders".to_owned());
            assert_eq!(decision.problems, [Problem::Follower { relation, of, is_selected }]);
        }
    }

    #[test]
    fn an_heir_of_a_selected_and_of_another_table_is_a_problem() {
        let mut contents = contents();
        contents.relations.push(Relation { parents: vec![1, 11], ..relation(4, "sales", "both", 'r') });
        let decision = decide(&contents, &selection(&["sales"], &[]));
        assert!(
            decision
                .problems
                .iter()
                .any(|problem| matches!(problem, Problem::Heir { relation, .. } if relation == "sales.both")),
            "{:?}",
            decision.problems
        );
    }

    #[test]
    fn what_a_selected_relation_lacks_is_a_problem_and_what_a_function_lacks_is_not() {
        let mut contents = contents();
        contents.foreign_keys = vec![ForeignKey { constraint: 60, from: 1, to: 11 }];
        contents.parts.insert((REWRITE, 61), (CLASS, 3));
        contents.needs.insert((REWRITE, 61), vec![((CLASS, 3), true), ((TYPE, 70), false)]);
        contents.parts.insert((TYPE, 70), (CLASS, 11));
        contents.needs.insert((FUNCTION, 102), vec![((TYPE, 70), false)]);
        let decision = decide(&contents, &selection(&["sales"], &["hr"]));
        let [orders, person, seen] = ["sales.orders", "hr.person", "sales.seen"].map(str::to_owned);
        let (constraint, part) = (60, (REWRITE, 61));
        assert_eq!(
            decision.problems,
            [
                Problem::ForeignKey { constraint, from: orders.clone(), to: person.clone(), from_is_left_out: false },
                Problem::Needs { part, of: seen, needed: person.clone() },
            ]
        );
        assert!(decision.others.contains(&(FUNCTION, 102)) && decision.left_out.contains(&(TYPE, 70)));
        let decision = decide(&contents, &selection(&["hr"], &[]));
        let from_is_left_out = true;
        assert_eq!(decision.problems, [Problem::ForeignKey { constraint, from: orders, to: person, from_is_left_out }]);
    }

    #[test]
    fn a_sequence_goes_with_its_column_and_an_extension_is_whole() {
        let mut contents = contents();
        contents.relations.push(Relation { owner: Some(11), ..relation(13, "hr", "person_id_seq", 'S') });
        contents.relations.push(Relation { of_extension: true, ..relation(14, "hr", "units", 'r') });
        contents.extension_schemas.insert(HR);
        let decision = decide(&contents, &selection(&["hr.person", "sales"], &[]));
        assert_eq!((left(&decision), decision.problems), (vec![12], Vec::new()));
        let decision = decide(&contents, &selection(&["sales"], &[]));
        assert_eq!(left(&decision), [11, 12, 13]);
        assert!(!decision.others.contains(&(NAMESPACE, HR)), "the extension is in it");
        let decision = decide(&contents, &selection(&[], &["hr.units"]));
        assert_eq!(decision.problems, [Problem::OfExtension { relation: "hr.units".into() }]);
    }

    #[test]
    fn patterns_that_select_nothing_are_named() {
        let decision =
            decide(&contents(), &selection(&["sales", "sales.*", "saels"], &["hr.*", "hr.peron", "sales.s*"]));
        assert_eq!(decision.unmatched, ["saels", "hr.peron"]);
    }
}
