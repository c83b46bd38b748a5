//! Differences between two dumps of definitions, and the statements that undo or repeat one of them; data only.

use crate::archive::Entry;
use std::collections::BTreeMap;
use stillpoint_migrate_postgres::link::identifier;

/// Kinds of entries that define nothing of a database.
const NOT_DEFINITIONS: [&str; 3] = ["ENCODING", "STDSTRINGS", "SEARCHPATH"];

/// Identity of an entry in dumps of any server: kind, schema, name, and its number among entries of the same name.
type Key<'e> = (&'e str, &'e str, &'e str, usize);

/// Differences, in the order in which they are to be made.
#[derive(Debug, Default)]
pub(crate) struct Changes<'e> {
    /// Entries that only the target has; what needs another one comes before it.
    pub(crate) removed: Vec<&'e Entry>,
    /// Entries that changed on the source, before and now.
    pub(crate) changed: Vec<(&'e Entry, &'e Entry)>,
    /// Entries that the target lacks.
    pub(crate) added: Vec<&'e Entry>,
}

fn keyed(entries: &[Entry]) -> BTreeMap<Key<'_>, &Entry> {
    let mut keyed = BTreeMap::new();
    for entry in entries.iter().filter(|entry| !NOT_DEFINITIONS.contains(&entry.kind.as_str())) {
        let mut key = (entry.kind.as_str(), entry.schema.as_str(), entry.tag.as_str(), 0);
        while keyed.contains_key(&key) {
            key.3 += 1;
        }
        keyed.insert(key, entry);
    }
    keyed
}

/// Compares the source before and now, and what the target has: the target's texts may differ where its version prints them in
/// another way, so a change is one of the source.
pub(crate) fn between<'e>(then: &'e [Entry], now: &'e [Entry], target: &'e [Entry]) -> Changes<'e> {
    let (known, present) = (keyed(then), keyed(target));
    let wanted = keyed(now);
    let mut changes = Changes::default();
    for (key, entry) in &wanted {
        match (known.get(key), present.get(key)) {
            (_, None) => changes.added.push(entry),
            (Some(before), Some(_)) if is_same(before, entry, is_identity) => {}
            (None, Some(there)) if is_same(there, entry, is_ours_on_target) => {}
            (before, Some(there)) => changes.changed.push((before.unwrap_or(there), entry)),
        }
    }
    changes.removed = present.iter().filter(|(key, _)| !wanted.contains_key(*key)).map(|(_, entry)| *entry).collect();
    let (before, after): (BTreeMap<u32, usize>, BTreeMap<u32, usize>) = (places(target), places(now));
    changes.removed.sort_by_key(|entry| std::cmp::Reverse(before.get(&entry.id).copied()));
    changes.changed.sort_by_key(|(_, entry)| after.get(&entry.id).copied());
    changes.added.sort_by_key(|entry| after.get(&entry.id).copied());
    changes
}

fn places(entries: &[Entry]) -> BTreeMap<u32, usize> {
    entries.iter().enumerate().map(|(at, entry)| (entry.id, at)).collect()
}

/// Entries of a target that are not as in a dump of another database of the same server, or not in it.
pub(crate) fn differing_there<'e>(target: &'e [Entry], wanted: &[Entry]) -> Vec<&'e Entry> {
    let wanted = keyed(wanted);
    let differs = |(key, entry): &(&Key<'_>, &&Entry)| {
        wanted.get(*key).is_none_or(|same| !is_same(entry, same, is_ours_on_target))
    };
    keyed(target).iter().filter(differs).map(|(_, entry)| *entry).collect()
}

/// Names of entries that differ between two dumps of one server, each with the first line that does.
pub(crate) fn differing(one: &[Entry], other: &[Entry]) -> Vec<String> {
    let (left, right) = (keyed(one), keyed(other));
    let differs = |(key, entry): (&Key<'_>, &&Entry)| match right.get(key) {
        Some(same) => (!is_same(entry, same, is_ours_on_target))
            .then(|| format!("{} ({})", entry.display(), first_difference(entry, same))),
        None => Some(entry.display()),
    };
    let missing = right.iter().filter(|(key, _)| !left.contains_key(*key)).map(|(_, entry)| entry.display());
    left.iter().filter_map(differs).chain(missing).collect()
}

fn first_difference(one: &Entry, other: &Entry) -> String {
    let lines = |entry: &Entry| {
        let lines = entry.definition.lines().map(|line| line.trim().to_owned());
        lines
            .filter(|line| !line.is_empty() && !is_ours_on_target(line))
            .chain([entry.owner.clone()])
            .collect::<Vec<_>>()
    };
    let (left, right) = (lines(one), lines(other));
    let at = left.iter().zip(&right).position(|(left, right)| left != right).unwrap_or(left.len().min(right.len()));
    let line = |lines: &[String]| lines.get(at).cloned().unwrap_or_default();
    format!("`{}` instead of `{}`", line(&left), line(&right))
}

fn is_same(one: &Entry, other: &Entry, is_ours: fn(&str) -> bool) -> bool {
    let lines = |entry: &Entry| {
        let all = entry.definition.lines().map(str::to_owned);
        // The bodies of others may hold anything.
        let has_ours = ["TABLE", "INDEX", "CONSTRAINT", "TRIGGER", "RULE"].contains(&entry.kind.as_str());
        let mut lines: Vec<String> = all.filter(|line| !has_ours || !is_ours(line) && !line.is_empty()).collect();
        // Rights are printed in the order in which they were given.
        if entry.kind.ends_with("ACL") {
            lines.sort();
        }
        lines
    };
    one.owner == other.owner && one.storage == other.storage && lines(one) == lines(other)
}

/// Returns true for a line about a replica identity, which a migration may change on both sides.
fn is_identity(line: &str) -> bool {
    line.starts_with("ALTER TABLE ") && find_outside(line, " REPLICA IDENTITY ").is_some()
}

/// Returns true for a line about what a migration changes for its time on the target: replica identities, and triggers and rules
/// that would fire in sessions that replay.
fn is_ours_on_target(line: &str) -> bool {
    let is_of = |needle: &str| find_outside(line, needle).is_some();
    let enables = [" ENABLE ", " DISABLE "].iter().any(|word| is_of(word)) && (is_of(" TRIGGER ") || is_of(" RULE "));
    is_identity(line) || line.starts_with("ALTER TABLE ") && enables
}

/// Place of `needle` in a statement, outside of quotes.
fn find_outside(statement: &str, needle: &str) -> Option<usize> {
    let mut quote = None;
    for (at, character) in statement.char_indices() {
        match quote {
            None if statement[at..].starts_with(needle) => return Some(at),
            None if matches!(character, '"' | '\'') => quote = Some(character),
            Some(open) if open == character => quote = None,
            _ => {}
        }
    }
    None
}

/// Splits simple statements: without bodies of functions.
fn statements(text: &str) -> Vec<&str> {
    let (mut rest, mut all) = (text, Vec::new());
    while let Some(end) = find_outside(rest, ";") {
        all.push(rest[..end].trim());
        rest = &rest[end + 1..];
    }
    all
}

/// Statement that makes the server forget an entry; `None` if the entry goes with another one.
pub(crate) fn removal(entry: &Entry, database: &str) -> Option<String> {
    let until = |needle: &str| find_outside(&entry.definition, needle).map(|end| &entry.definition[..end]);
    match entry.kind.as_str() {
        "COMMENT" | "SECURITY LABEL" => until(" IS ").map(|of| format!("{of} IS NULL")),
        "ACL" | "DEFAULT ACL" => Some(inverse_rights(&entry.definition)),
        "SEQUENCE OWNED BY" => until(" OWNED BY ").map(|of| format!("{of} OWNED BY NONE")),
        "ROW SECURITY" => Some(entry.definition.replacen(" ENABLE ROW ", " DISABLE ROW ", 1)),
        "TABLE ATTACH" => {
            let [parent, part] = entry.definition.split_once(" ATTACH PARTITION ").map(<[&str; 2]>::from)?;
            let bound = [" FOR VALUES ", " DEFAULT"].iter().filter_map(|needle| find_outside(part, needle)).min()?;
            Some(format!("{parent} DETACH PARTITION {}", &part[..bound]))
        }
        "DATABASE PROPERTIES" => Some(without_settings(&entry.definition, database)),
        _ => Some(entry.drop.clone()).filter(|drop| !drop.is_empty()),
    }
}

/// Statements that take back what statements about rights do: each GRANT and each REVOKE becomes the other one.
pub(crate) fn inverse_rights(text: &str) -> String {
    let inverse = |statement: &&str| -> String {
        let (own, rest) =
            match find_outside(statement, "GRANT ").into_iter().chain(find_outside(statement, "REVOKE ")).min() {
                Some(at) => statement.split_at(at),
                None => return format!("{statement}; "),
            };
        let (words, to, from, word) = match rest.strip_prefix("GRANT ") {
            Some(rest) => (rest, " TO ", " FROM ", "REVOKE"),
            None => (rest.strip_prefix("REVOKE ").unwrap_or(rest), " FROM ", " TO ", "GRANT"),
        };
        let words = words.strip_suffix(" WITH GRANT OPTION").unwrap_or(words);
        // The role is the last word.
        let mut place = None;
        let mut after = 0;
        while let Some(at) = find_outside(&words[after..], to) {
            place = Some(after + at);
            after += at + to.len();
        }
        match place {
            Some(at) => format!("{own}{word} {}{from}{}; ", &words[..at], &words[at + to.len()..]),
            None => String::new(),
        }
    };
    statements(text).iter().map(inverse).collect()
}

/// Statements that take back the settings of a database, and those of roles in it.
fn without_settings(text: &str, database: &str) -> String {
    let of_roles = statements(text).into_iter().filter(|statement| statement.starts_with("ALTER ROLE "));
    let of_roles = of_roles.filter_map(|statement| Some(&statement[..find_outside(statement, " SET ")?]));
    let reset = |of: String| format!("{of} RESET ALL; ");
    [reset(format!("ALTER DATABASE {database}"))].into_iter().chain(of_roles.map(str::to_owned).map(reset)).collect()
}

/// Statements that make a changed entry what it is now without dropping it; `None` if it has to be created again.
pub(crate) fn replacement(before: &Entry, now: &Entry, database: &str) -> Option<String> {
    const REPLACED: [&str; 4] = ["CREATE FUNCTION ", "CREATE PROCEDURE ", "CREATE AGGREGATE ", "CREATE VIEW "];
    let definition = &now.definition;
    let text_changed = before.definition != *definition;
    let changed = match now.kind.as_str() {
        // Columns and settings of a table are compared one by one.
        _ if !text_changed || now.kind == "TABLE" => String::new(),
        "DATABASE" => return None,
        "COMMENT" | "SECURITY LABEL" | "DEFAULT" | "SEQUENCE OWNED BY" => definition.clone(),
        "ACL" | "DEFAULT ACL" => format!("{}{definition}", inverse_rights(&before.definition)),
        "DATABASE PROPERTIES" => format!("{}{definition}", without_settings(&before.definition, database)),
        "SEQUENCE" if definition.starts_with("CREATE SEQUENCE ") => definition.replacen("CREATE ", "ALTER ", 1),
        _ if REPLACED.iter().any(|start| definition.starts_with(start)) => {
            definition.replacen("CREATE ", "CREATE OR REPLACE ", 1)
        }
        _ => return None,
    };
    let object = now.drop.strip_prefix("DROP ").and_then(|drop| drop.trim_end().strip_suffix(';'));
    // What is replaced may have been dropped with something that it used; then the statement makes it, as ours.
    let is_made = changed.starts_with("CREATE OR REPLACE ");
    let owner = object.filter(|_| (is_made || before.owner != now.owner) && !now.owner.is_empty());
    let owner = owner.map(|object| format!("; ALTER {object} OWNER TO {}", identifier(&now.owner)));
    let space = object.filter(|_| before.storage.0 != now.storage.0).map(|object| {
        let space = if now.storage.0.is_empty() { "pg_default" } else { &now.storage.0 };
        format!("; ALTER {object} SET TABLESPACE {}", identifier(space))
    });
    if before.owner != now.owner && owner.is_none()
        || before.storage.0 != now.storage.0 && space.is_none()
        || before.storage.1 != now.storage.1
    {
        return None;
    }
    Some([changed, owner.unwrap_or_default(), space.unwrap_or_default()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: &str, tag: &str, definition: &str) -> Entry {
        let drop = if kind == "VIEW" { format!("DROP VIEW public.{tag};\n") } else { String::new() };
        let (kind, schema) = (kind.to_owned(), "public".to_owned());
        Entry {
            id: tag.len() as u32,
            kind,
            schema,
            tag: tag.into(),
            definition: definition.into(),
            drop,
            ..Entry::default()
        }
    }

    #[test]
    fn a_change_is_one_of_the_source_and_presence_is_that_on_the_target() {
        let then = [entry("VIEW", "a", "1"), entry("VIEW", "bb", "1"), entry("VIEW", "gone", "1")];
        let now = [entry("VIEW", "a", "1"), entry("VIEW", "bb", "2"), entry("VIEW", "ccccc", "1")];
        let target =
            [entry("VIEW", "a", "printed in another way"), entry("VIEW", "bb", "1"), entry("VIEW", "gone", "1")];
        let changes = between(&then, &now, &target);
        let tags = |entries: &[&Entry]| entries.iter().map(|entry| entry.tag.clone()).collect::<Vec<_>>();
        assert_eq!((tags(&changes.added), tags(&changes.removed)), (vec!["ccccc".into()], vec!["gone".into()]));
        assert_eq!(changes.changed.iter().map(|(_, entry)| entry.tag.as_str()).collect::<Vec<_>>(), ["bb"]);
        // Repeated after it was done: nothing to add or remove.
        let again = between(&then, &now, &now);
        assert!(again.added.is_empty() && again.removed.is_empty());
        assert_eq!(again.changed.iter().map(|(_, entry)| entry.tag.as_str()).collect::<Vec<_>>(), ["bb"]);
        let found = ["view public.bb (`1` instead of `2`)", "view public.gone", "view public.ccccc"];
        assert_eq!(differing(&then, &now), found);
    }

    #[test]
    fn what_a_migration_changes_for_its_time_is_no_difference() {
        let of = |text: &str| [entry("TABLE", "t", text)];
        let plain = of("CREATE TABLE public.t ();\n\n");
        assert!(
            differing(&plain, &of("CREATE TABLE public.t ();\n\nALTER TABLE ONLY public.t REPLICA IDENTITY FULL;\n"))
                .is_empty()
        );
        assert!(
            differing(&plain, &of("CREATE TABLE public.t ();\nALTER TABLE public.t ENABLE ALWAYS TRIGGER x;\n"))
                .is_empty()
        );
        assert!(
            !differing(&plain, &of("CREATE TABLE public.t ();\nALTER TABLE public.t ENABLE ROW LEVEL SECURITY;\n"))
                .is_empty()
        );
    }

    #[test]
    fn a_trigger_that_is_disabled_is_a_change_of_the_source() {
        let of = |text: &str| [entry("TRIGGER", "t", &format!("CREATE TRIGGER t;\n\n{text}"))];
        let (enabled, disabled) = (of(""), of("ALTER TABLE public.t DISABLE TRIGGER t;\n"));
        assert_eq!(between(&enabled, &disabled, &enabled).changed.len(), 1);
        assert!(differing(&enabled, &disabled).is_empty(), "on the target it may be one for the time of the migration");
    }

    #[test]
    fn rights_are_taken_back_statement_by_statement() {
        assert_eq!(
            inverse_rights(
                "REVOKE ALL ON FUNCTION public.f() FROM PUBLIC;\nGRANT SELECT,INSERT ON TABLE public.\"a TO b; c\" TO \"the guest\" WITH GRANT OPTION;\n"
            ),
            "GRANT ALL ON FUNCTION public.f() TO PUBLIC; REVOKE SELECT,INSERT ON TABLE public.\"a TO b; c\" FROM \"the guest\"; "
        );
        assert_eq!(
            inverse_rights("ALTER DEFAULT PRIVILEGES FOR ROLE x IN SCHEMA s GRANT SELECT ON TABLES TO y;\n"),
            "ALTER DEFAULT PRIVILEGES FOR ROLE x IN SCHEMA s REVOKE SELECT ON TABLES FROM y; "
        );
        assert_eq!(
            inverse_rights(
                "SET SESSION AUTHORIZATION a;\nGRANT USAGE ON SCHEMA s TO b;\nRESET SESSION AUTHORIZATION;\n"
            ),
            "SET SESSION AUTHORIZATION a; REVOKE USAGE ON SCHEMA s FROM b; RESET SESSION AUTHORIZATION; "
        );
    }

    #[test]
    fn each_kind_is_removed_in_its_way() {
        let removed = |kind: &str, definition: &str| removal(&entry(kind, "x", definition), "shop");
        assert_eq!(
            removed("COMMENT", "COMMENT ON COLUMN public.\"t IS s\".c IS 'it IS';\n").unwrap(),
            "COMMENT ON COLUMN public.\"t IS s\".c IS NULL"
        );
        assert_eq!(
            removed(
                "TABLE ATTACH",
                "ALTER TABLE ONLY public.p ATTACH PARTITION public.\"a DEFAULT\" FOR VALUES FROM (1) TO (2);\n"
            )
            .unwrap(),
            "ALTER TABLE ONLY public.p DETACH PARTITION public.\"a DEFAULT\""
        );
        assert_eq!(
            removed(
                "DATABASE PROPERTIES",
                "ALTER DATABASE shop SET a TO 'b; c';\nALTER ROLE \"x SET\" IN DATABASE shop SET a TO 'b';\n"
            )
            .unwrap(),
            "ALTER DATABASE shop RESET ALL; ALTER ROLE \"x SET\" IN DATABASE shop RESET ALL; "
        );
        assert_eq!(removed("INDEX ATTACH", "ALTER INDEX public.p ATTACH PARTITION public.q;\n"), None);
        assert_eq!(removed("VIEW", "CREATE VIEW public.x AS\n SELECT 1;\n").unwrap(), "DROP VIEW public.x;\n");
        assert_eq!(
            removed("ROW SECURITY", "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY;\n").unwrap(),
            "ALTER TABLE public.t DISABLE ROW LEVEL SECURITY;\n"
        );
    }

    #[test]
    fn an_entry_is_replaced_where_its_kind_allows_that() {
        let (before, mut now) =
            (entry("VIEW", "v", "CREATE VIEW public.v AS 1"), entry("VIEW", "v", "CREATE VIEW public.v AS 2"));
        assert_eq!(replacement(&before, &now, "shop").unwrap(), "CREATE OR REPLACE VIEW public.v AS 2");
        now.owner = "the owner".into();
        now.definition.clone_from(&before.definition);
        assert_eq!(replacement(&before, &now, "shop").unwrap(), "; ALTER VIEW public.v OWNER TO \"the owner\"");
        assert_eq!(replacement(&entry("INDEX", "i", "1"), &entry("INDEX", "i", "2"), "shop"), None);
    }
}
