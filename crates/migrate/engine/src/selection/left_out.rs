//! Objects that a selection leaves out, as the catalogs of a server show it at one moment.

use super::graph::{CLASS, Contents, Decision, ForeignKey, NAMESPACE, Object, Problem, Relation, decide};
use super::{Selection, pattern};
use crate::archive::Entry;
use std::collections::{BTreeSet, HashMap};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{Inventory, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{Link, Row, number, text};

/// Maximum length of the options of pg_dump that name relations, in bytes: the system passes 2 MiB to a program.
const OPTIONS_BYTES_MAX: usize = 1 << 20;
/// Attempts to see the source twice without a change of what is left out.
const LOOKS_MAX: usize = 20;

/// Objects that are left out. Empty for a whole database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    objects: BTreeSet<Object>,
    relations: Vec<LeftName>,
}

/// A relation that is left out.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LeftName {
    oid: u32,
    /// Qualified name as the server quotes it.
    quoted: String,
    schema: String,
    name: String,
    /// Kind as in `pg_class.relkind`.
    kind: char,
}

/// Effect of a selection on a database.
pub(crate) struct Resolution {
    pub(crate) left_out: LeftOut,
    pub(crate) decision: Decision,
}

impl LeftOut {
    /// Returns true if nothing is left out.
    pub(crate) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Returns true if an object is left out.
    pub(crate) fn has(&self, object: Object) -> bool {
        self.objects.contains(&object)
    }

    /// Returns true if a relation is left out.
    pub(crate) fn has_relation(&self, oid: u32) -> bool {
        self.has((CLASS, oid))
    }

    /// Removes what is left out from an inventory that was read before.
    pub(crate) fn remove_from(&self, inventory: &mut Inventory) {
        if self.is_empty() {
            return;
        }
        inventory.tables.retain(|table| !self.has_relation(table.oid));
        inventory.partitioned.retain(|table| !self.has_relation(table.oid));
        inventory.sequences.retain(|name| self.relations.iter().all(|left| left.quoted != *name));
    }

    /// SQL condition for relations that are not left out; `number` is an expression for their numbers.
    pub(crate) fn condition(&self, number: &str) -> String {
        let all: Vec<String> = self.objects.iter().filter(|of| of.0 == CLASS).map(|of| of.1.to_string()).collect();
        if all.is_empty() { "true".into() } else { format!("{number} <> ALL ('{{{}}}'::oid[])", all.join(",")) }
    }

    /// Query for catalog and number of everything that is left out; `None` if nothing is.
    pub(crate) fn objects_sql(&self) -> Option<String> {
        let all = |of: fn(&Object) -> u32| {
            self.objects.iter().map(|object| of(object).to_string()).collect::<Vec<_>>().join(",")
        };
        let (classes, numbers) = (all(|object| object.0), all(|object| object.1));
        (!self.is_empty()).then(|| format!("SELECT * FROM unnest('{{{classes}}}'::oid[], '{{{numbers}}}'::oid[])"))
    }

    /// Options of pg_dump, so that it does not lock what is left out. Empty if they would be too long: what it dumps is
    /// removed from the dump in any case ([`Self::has_entry`]).
    pub(crate) fn dump_options(&self) -> Vec<String> {
        let option = |left: &LeftName| {
            let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
            format!("--exclude-table={}.{}", quoted(&left.schema), quoted(&left.name))
        };
        let options: Vec<String> = self.relations.iter().map(option).collect();
        let bytes: usize = options.iter().map(|option| option.len() + size_of::<usize>() + 1).sum();
        if bytes > OPTIONS_BYTES_MAX { Vec::new() } else { options }
    }

    /// Numbers of the entries of a dump that are left out: those of objects that are, and those that need one of these.
    pub(crate) fn entries_of(&self, entries: &[Entry]) -> BTreeSet<u32> {
        let mut left: BTreeSet<u32> = BTreeSet::new();
        loop {
            let before = left.len();
            for entry in entries.iter().filter(|entry| !entry.is_of_database()) {
                if self.has(entry.object) || entry.needs.iter().any(|needed| left.contains(needed)) {
                    left.insert(entry.id);
                }
            }
            if left.len() == before {
                return left;
            }
        }
    }

    /// Number of tables that hold rows.
    pub(crate) fn table_count(&self) -> u64 {
        self.relations.iter().filter(|left| left.kind == 'r').count() as u64
    }

    /// Names of the relations that clients do not find on the target, for a message; only the first of many.
    pub(crate) fn names(&self) -> String {
        const NAMED_MAX: usize = 30;
        let name = |left: &LeftName| pattern::exact(&left.schema, &left.name);
        let names = self.relations.iter().take(NAMED_MAX).map(name).collect::<Vec<_>>().join(", ");
        match self.relations.len().saturating_sub(NAMED_MAX) {
            0 => names,
            more => format!("{names} and {more} more"),
        }
    }
}

impl Selection {
    /// Finds what is left out, and what is wrong with the selection. The answer is that of one moment.
    ///
    /// # Errors
    ///
    /// Errors of the connection to the server.
    pub(crate) async fn resolve(&self, link: &mut Link) -> Result<Resolution, Error> {
        if self.is_all() {
            return Ok(Resolution { left_out: LeftOut::default(), decision: Decision::default() });
        }
        let (contents, quoted) = contents(&link.query(&contents_sql()).await?);
        let decision = decide(&contents, self);
        let name = |relation: &Relation| LeftName {
            oid: relation.oid,
            quoted: quoted.get(&relation.oid).cloned().unwrap_or_default(),
            schema: relation.schema.clone(),
            name: relation.name.clone(),
            kind: relation.kind,
        };
        let relations = decision.relations.iter().map(|left| name(&left.relation)).collect();
        Ok(Resolution { left_out: LeftOut { objects: decision.left_out.clone(), relations }, decision })
    }

    /// Finds what is left out.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if what is selected needs something that is not; errors of the connection to the server.
    pub(crate) async fn left_out(&self, link: &mut Link) -> Result<LeftOut, Error> {
        let Resolution { left_out, decision } = self.resolve(link).await?;
        if decision.problems.is_empty() {
            return Ok(left_out);
        }
        let texts = texts(link, &decision.problems).await?;
        Err(Error::Refused(texts.into_iter().map(|(name, why)| format!("selection {name}: {why}")).collect()))
    }

    /// Reads the selected part of an inventory.
    ///
    /// # Errors
    ///
    /// As [`Self::left_out`].
    pub(crate) async fn inventory(&self, link: &mut Link) -> Result<Inventory, Error> {
        let mut inventory = Inventory::read(link).await?;
        // After it: a table that is made between the two looks is in neither.
        self.left_out(link).await?.remove_from(&mut inventory);
        Ok(inventory)
    }

    /// Calls `look` with what is left out, until that is the same before and after it: a session that is in no transaction
    /// sees two moments.
    ///
    /// # Errors
    ///
    /// As [`Self::left_out`], and those of `look`.
    pub(crate) async fn look<T>(
        &self,
        link: &mut Link,
        mut look: impl AsyncFnMut(&mut Link, &LeftOut) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut left_out = self.left_out(link).await?;
        for _ in 1..LOOKS_MAX {
            let found = look(link, &left_out).await?;
            let again = if self.is_all() { left_out.clone() } else { self.left_out(link).await? };
            if again == left_out {
                return Ok(found);
            }
            left_out = again;
        }
        look(link, &left_out).await
    }
}

/// Names and descriptions of problems, with what to do about each.
///
/// # Errors
///
/// Errors of the connection to the server.
pub(crate) async fn texts(link: &mut Link, problems: &[Problem]) -> Result<Vec<(String, String)>, Error> {
    const CONSTRAINT: u32 = 2606;
    let part = |problem: &Problem| match problem {
        Problem::ForeignKey { constraint, .. } => Some((CONSTRAINT, *constraint)),
        Problem::Needs { part, .. } => Some(*part),
        Problem::Follower { .. } | Problem::Heir { .. } | Problem::OfExtension { .. } => None,
    };
    let parts: Vec<Object> = problems.iter().filter_map(part).collect();
    let described = describe(link, &parts).await?;
    let name = |problem: &Problem| part(problem).and_then(|part| described.get(&part).cloned()).unwrap_or_default();
    let text = |problem: &Problem| match problem {
        Problem::ForeignKey { from, to, from_is_left_out: false, .. } => (
            from.clone(),
            format!(
                "{} refers to {to}, which is left out: include {to}, leave {from} out too, or drop the constraint",
                name(problem)
            ),
        ),
        Problem::ForeignKey { from, to, .. } => (
            from.clone(),
            format!(
                "it is left out, and its {} refers to {to}, which is moved: include {from}, leave {to} out too, or drop the \
                 constraint",
                name(problem)
            ),
        ),
        Problem::Needs { of, needed, .. } => (
            of.clone(),
            format!("{} needs {needed}, which is left out: include {needed}, or leave {of} out too", name(problem)),
        ),
        Problem::Follower { relation, of, is_selected: true } => {
            (relation.clone(), format!("it cannot be left out alone, because it is a part of {of}, which is moved"))
        }
        Problem::Follower { relation, of, is_selected: false } => {
            (relation.clone(), format!("it cannot be moved alone, because it is a part of {of}: include {of}"))
        }
        Problem::Heir { relation, selected, left_out } => (
            relation.clone(),
            format!("it inherits from {selected}, which is moved, and from {left_out}, which is left out"),
        ),
        Problem::OfExtension { relation } => {
            (relation.clone(), "it belongs to an extension, and goes with it: do not exclude it".to_owned())
        }
    };
    Ok(problems.iter().map(text).collect())
}

/// Kind and name of objects, as the server describes them.
///
/// # Errors
///
/// Errors of the connection to the server.
pub(crate) async fn describe(link: &mut Link, objects: &[Object]) -> Result<HashMap<Object, String>, Error> {
    let all =
        |of: fn(&Object) -> u32| objects.iter().map(|object| of(object).to_string()).collect::<Vec<_>>().join(",");
    let (classes, numbers) = (all(|object| object.0), all(|object| object.1));
    let sql = format!(
        "SELECT c, o, pg_describe_object(c, o, 0) FROM unnest('{{{classes}}}'::oid[], '{{{numbers}}}'::oid[]) u (c, o)"
    );
    let rows = link.query(&sql).await?;
    Ok(rows.iter().map(|row| ((number(row, 0), number(row, 1)), text(row, 2))).collect())
}

/// Query for the contents of a database. The first column of each row is its kind, and the last one a flag.
fn contents_sql() -> String {
    let schemas = format!("(SELECT n.oid FROM pg_namespace n WHERE {USER_SCHEMA})");
    let in_schema = |catalog: &str, column: &str| {
        format!(
            "SELECT 'object', tableoid, oid, {column}, 0::int8, '', '', '', false FROM {catalog} WHERE {column} IN {schemas}"
        )
    };
    let objects = [
        ("pg_proc", "pronamespace"),
        ("pg_type", "typnamespace"),
        ("pg_operator", "oprnamespace"),
        ("pg_opclass", "opcnamespace"),
        ("pg_opfamily", "opfnamespace"),
        ("pg_collation", "collnamespace"),
        ("pg_conversion", "connamespace"),
        ("pg_ts_config", "cfgnamespace"),
        ("pg_ts_dict", "dictnamespace"),
        ("pg_ts_parser", "prsnamespace"),
        ("pg_ts_template", "tmplnamespace"),
        ("pg_default_acl", "defaclnamespace"),
    ];
    let global = [
        "pg_cast",
        "pg_transform",
        "pg_event_trigger",
        "pg_language",
        "pg_foreign_data_wrapper",
        "pg_foreign_server",
        "pg_user_mapping",
        "pg_publication",
        "pg_am",
        "pg_extension",
    ];
    let part = |catalog: &str, object: &str, owner: &str, number: &str, quiet: &str, which: &str| {
        format!(
            "SELECT 'part', {object}, {owner}::regclass::oid, {number}::int8, '', '', '', {quiet} FROM {catalog} WHERE {which}"
        )
    };
    let (class, of_type) = ("'pg_class'", "'pg_type'");
    let own = |oid: &str| format!("tableoid, {oid}");
    let parts = [
        part(
            "pg_constraint",
            &own("oid"),
            "CASE conrelid WHEN 0 THEN 'pg_type' ELSE 'pg_class' END",
            "CASE conrelid WHEN 0 THEN contypid ELSE conrelid END",
            "contype = 'f'",
            "oid >= 16384",
        ),
        part("pg_attrdef", &own("oid"), class, "adrelid", "false", "true"),
        part("pg_trigger", &own("oid"), class, "tgrelid", "tgisinternal", "true"),
        part("pg_rewrite", &own("oid"), class, "ev_class", "false", "oid >= 16384"),
        part("pg_policy", &own("oid"), class, "polrelid", "false", "true"),
        part("pg_statistic_ext", &own("oid"), class, "stxrelid", "false", "true"),
        part("pg_publication_rel", &own("oid"), class, "prrelid", "true", "true"),
        part("pg_index", "'pg_class'::regclass::oid, indexrelid", class, "indrelid", "false", "indexrelid >= 16384"),
        part("pg_class", "tableoid, reltoastrelid", class, "oid", "true", "reltoastrelid >= 16384"),
        part(
            "pg_type t",
            &own("oid"),
            class,
            "typrelid",
            "false",
            "typrelid >= 16384 AND (SELECT relkind FROM pg_class c WHERE c.oid = t.typrelid) <> 'c'",
        ),
        part(
            "pg_type t",
            "'pg_class'::regclass::oid, typrelid",
            of_type,
            "oid",
            "true",
            "typrelid >= 16384 AND (SELECT relkind FROM pg_class c WHERE c.oid = t.typrelid) = 'c'",
        ),
        part("pg_type", "tableoid, typarray", of_type, "oid", "true", "typarray >= 16384"),
        part("pg_range", "'pg_type'::regclass::oid, rngmultitypid", of_type, "rngtypid", "true", "rngtypid >= 16384"),
        part(
            "pg_depend",
            "classid, objid",
            of_type,
            "refobjid",
            "true",
            "classid = 'pg_proc'::regclass AND refclassid = 'pg_type'::regclass AND deptype = 'i'",
        ),
    ];
    let mut queries = vec![
        format!("SELECT 'schema', n.oid, 0::oid, 0::oid, 0::int8, n.nspname::text, '', '', false FROM pg_namespace n WHERE {USER_SCHEMA}"),
        format!(
            "SELECT 'relation', c.oid, coalesce((SELECT d.refobjid FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND \
             d.objid = c.oid AND d.refclassid = 'pg_class'::regclass AND d.refobjsubid > 0 AND d.deptype IN ('a', 'i') AND \
             c.relkind = 'S' LIMIT 1), 0), ascii(c.relkind::text)::oid, 0::int8, n.nspname::text, c.relname::text, \
             concat(quote_ident(n.nspname), '.', quote_ident(c.relname)), \
             EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e') \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm', 'S') \
             AND c.relpersistence <> 't' AND {USER_SCHEMA}"
        ),
        "SELECT 'parent', inhrelid, inhparent, 0::oid, 0::int8, '', '', '', false FROM pg_inherits".into(),
        "SELECT 'key', oid, conrelid, confrelid, 0::int8, '', '', '', false FROM pg_constraint WHERE contype = 'f' AND conparentid = 0"
            .into(),
        "SELECT 'member', classid, objid, 0::oid, 0::int8, '', '', '', false FROM pg_depend WHERE deptype = 'e'".into(),
        "SELECT 'in extension', extnamespace, 0::oid, 0::oid, 0::int8, '', '', '', false FROM pg_extension".into(),
        "SELECT 'needs', classid, objid, refclassid, refobjid::int8, '', '', '', deptype IN ('a', 'i') FROM pg_depend \
         WHERE objid >= 16384 AND refobjid >= 16384 AND deptype <> 'e'"
            .into(),
    ];
    queries.extend(objects.map(|(catalog, column)| in_schema(catalog, column)));
    queries.extend(global.map(|catalog| {
        format!("SELECT 'global', tableoid, oid, 0::oid, 0::int8, '', '', '', false FROM {catalog} WHERE oid >= 16384")
    }));
    queries.extend(parts);
    queries.join(" UNION ALL ")
}

/// Contents in the answer, and the relations' names as the server quotes them.
fn contents(rows: &[Row]) -> (Contents, HashMap<u32, String>) {
    let (mut contents, mut quoted) = (Contents::default(), HashMap::new());
    let mut parents: HashMap<u32, Vec<u32>> = HashMap::new();
    for row in rows {
        let of = |at: usize| number::<u32>(row, at);
        let is = text(row, 8) == "t";
        let object = (of(1), of(2));
        match text(row, 0).as_str() {
            "schema" => contents.schemas.push((of(1), text(row, 5))),
            "relation" => {
                quoted.insert(of(1), text(row, 7));
                contents.relations.push(Relation {
                    oid: of(1),
                    schema: text(row, 5),
                    name: text(row, 6),
                    kind: char::from_u32(of(3)).unwrap_or_default(),
                    parents: Vec::new(),
                    owner: Some(of(2)).filter(|owner| *owner != 0),
                    of_extension: is,
                });
            }
            "parent" => parents.entry(of(1)).or_default().push(of(2)),
            "key" => {
                contents.foreign_keys.push(ForeignKey { constraint: of(1), from: of(2), to: of(3) });
            }
            "member" => {
                contents.members.insert(object);
                if object.0 == NAMESPACE {
                    contents.extension_schemas.insert(object.1);
                }
            }
            "in extension" => drop(contents.extension_schemas.insert(of(1))),
            "needs" => contents.needs.entry(object).or_default().push(((of(3), of(4)), is)),
            "object" => contents.objects.push((object, of(3))),
            "global" => contents.global.push(object),
            _ => {
                contents.parts.insert(object, (of(3), of(4)));
                if is {
                    contents.quiet.insert(object);
                }
            }
        }
    }
    for relation in &mut contents.relations {
        relation.parents = parents.remove(&relation.oid).unwrap_or_default();
    }
    let (parts, members) = (&contents.parts, &contents.members);
    contents.objects.retain(|(object, _)| !parts.contains_key(object));
    contents.global.retain(|object| !members.contains(object));
    contents.relations.sort_by(|a, b| (&a.schema, &a.name).cmp(&(&b.schema, &b.name)));
    (contents, quoted)
}
