//! The list of definitions in an archive of `pg_dump --format=custom` (`pg_backup_archiver.c`, `ReadHead` and `ReadToc`; versions
//! 1.14 to 1.16, which PostgreSQL 12 to 18 write). An archive holds names and texts of the source, each with its length.

use std::collections::BTreeSet;
use std::ops::Range;
use stillpoint_migrate_apply::Error;

/// Maximum number of definitions in an archive.
const ENTRIES_MAX: usize = 5_000_000;
/// Kind of the entry with the settings of the database.
pub(crate) const DATABASE_SETTINGS: &str = "DATABASE PROPERTIES";

/// One definition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Number in the archive.
    pub(crate) id: u32,
    /// Number of its catalog, and in it, on the server that was dumped; 0 for rights, comments and the like.
    pub(crate) object: (u32, u32),
    /// Kind as pg_dump names it, such as `TABLE` or `FK CONSTRAINT`.
    pub(crate) kind: String,
    /// Schema; empty if it is in none.
    pub(crate) schema: String,
    /// Name within its kind and schema, such as `goods goods_pkey` for a constraint.
    pub(crate) tag: String,
    /// Statements that create it.
    pub(crate) definition: String,
    /// Statement that drops it; empty if there is none.
    pub(crate) drop: String,
    /// Role that owns it; empty if it has no owner.
    pub(crate) owner: String,
    /// Its tablespace and table access method; empty for the default.
    pub(crate) storage: (String, String),
    /// Numbers of the definitions that it needs.
    pub(crate) needs: Vec<u32>,
}

impl Entry {
    /// Kind and name, for messages.
    pub(crate) fn display(&self) -> String {
        let dot = if self.schema.is_empty() { "" } else { "." };
        format!("{} {}{dot}{}", self.kind.to_lowercase(), self.schema, self.tag)
    }

    /// Returns true for an entry that pg_restore leaves out unless it creates the database too.
    pub(crate) fn is_of_database(&self) -> bool {
        match self.kind.as_str() {
            "DATABASE" | DATABASE_SETTINGS => true,
            "ACL" | "COMMENT" | "SECURITY LABEL" => self.tag.starts_with("DATABASE "),
            _ => false,
        }
    }
}

/// The bytes of an archive that are not read yet.
struct Unread<'a> {
    bytes: &'a [u8],
    integer_size: usize,
}

impl<'a> Unread<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(count)?;
        self.bytes = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }

    /// A sign, then the number, lowest byte first.
    fn integer(&mut self) -> Option<i64> {
        let is_negative = self.byte()? != 0;
        let bytes = self.take(self.integer_size)?;
        let number = bytes.iter().rev().fold(0i64, |number, byte| number << 8 | i64::from(*byte));
        Some(if is_negative { -number } else { number })
    }

    /// A text with its length; the inner `None` is a text that is absent.
    fn optional_text(&mut self) -> Option<Option<String>> {
        let length = self.integer()?;
        if length < 0 {
            return Some(None);
        }
        let bytes = self.take(usize::try_from(length).ok()?)?;
        Some(Some(String::from_utf8_lossy(bytes).into_owned()))
    }

    fn text(&mut self) -> Option<String> {
        self.optional_text().map(Option::unwrap_or_default)
    }
}

/// Reads the definitions of an archive in the order in which they can be created.
///
/// # Errors
///
/// [`Error::Program`] if it is not such an archive.
pub(crate) fn read(bytes: &[u8]) -> Result<Vec<Entry>, Error> {
    parse(bytes).map(|parsed| parsed.entries).ok_or_else(unreadable)
}

fn unreadable() -> Error {
    Error::Program { program: "pg_dump".into(), why: "it wrote an archive that cannot be read".into() }
}

/// Removes definitions from an archive without rows.
///
/// # Errors
///
/// [`Error::Program`] if it is not such an archive.
pub(crate) fn without(bytes: &[u8], removed: &BTreeSet<u32>) -> Result<Vec<u8>, Error> {
    let Parsed { entries, places, count, end, integer_size, .. } = parse(bytes).ok_or_else(unreadable)?;
    let kept: Vec<&Range<usize>> =
        entries.iter().zip(&places).filter(|(entry, _)| !removed.contains(&entry.id)).map(|(_, place)| place).collect();
    let mut archive = bytes[..count].to_vec();
    archive.push(0);
    archive.extend((0..integer_size).map(|byte| kept.len().checked_shr(8 * byte as u32).unwrap_or(0) as u8));
    kept.into_iter().for_each(|place| archive.extend_from_slice(&bytes[place.clone()]));
    archive.extend_from_slice(&bytes[end..]);
    Ok(archive)
}

/// Replaces statements and tablespaces of definitions in an archive without rows: `change` returns those that are other than
/// before.
///
/// # Errors
///
/// [`Error::Program`] if it is not such an archive.
pub(crate) fn rewritten(
    bytes: &[u8],
    change: impl Fn(&Entry) -> (Option<String>, Option<String>),
) -> Result<Vec<u8>, Error> {
    let Parsed { entries, texts, integer_size, .. } = parse(bytes).ok_or_else(unreadable)?;
    let (mut archive, mut done) = (Vec::with_capacity(bytes.len()), 0);
    for (entry, [definition, tablespace]) in entries.iter().zip(&texts) {
        let (new_definition, new_tablespace) = change(entry);
        for (place, text) in [(definition, new_definition), (tablespace, new_tablespace)] {
            let Some(text) = text else { continue };
            archive.extend_from_slice(&bytes[done..place.start]);
            archive.push(0);
            archive.extend((0..integer_size).map(|byte| text.len().checked_shr(8 * byte as u32).unwrap_or(0) as u8));
            archive.extend_from_slice(text.as_bytes());
            done = place.end;
        }
    }
    archive.extend_from_slice(&bytes[done..]);
    Ok(archive)
}

/// Definitions of an archive, and where they are in it.
struct Parsed {
    entries: Vec<Entry>,
    /// Places of the entries.
    places: Vec<Range<usize>>,
    /// Places of their statements and tablespaces.
    texts: Vec<[Range<usize>; 2]>,
    /// Place of their number.
    count: usize,
    /// Place after the last one.
    end: usize,
    /// Size of the bytes of a number, without its sign.
    integer_size: usize,
}

fn parse(bytes: &[u8]) -> Option<Parsed> {
    let mut unread = Unread { bytes: bytes.strip_prefix(b"PGDMP")?, integer_size: 4 };
    let version = (unread.byte()?, unread.byte()?);
    unread.byte()?;
    if !((1, 14)..=(1, 16)).contains(&version) {
        return None;
    }
    unread.integer_size = usize::from(unread.byte()?);
    let offset_size = usize::from(unread.byte()?);
    const CUSTOM: u8 = 1;
    if !(1..=7).contains(&unread.integer_size) || unread.byte()? != CUSTOM {
        return None;
    }
    if version >= (1, 15) {
        unread.byte()?;
    } else {
        unread.integer()?;
    }
    // Time of the dump, its database, and the versions of server and program.
    for _ in 0..7 {
        unread.integer()?;
    }
    for _ in 0..3 {
        unread.text()?;
    }
    let count_at = bytes.len() - unread.bytes.len();
    let count = usize::try_from(unread.integer()?).ok().filter(|count| *count <= ENTRIES_MAX)?;
    let (mut entries, mut places, mut texts) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count {
        let begin = bytes.len() - unread.bytes.len();
        let id = u32::try_from(unread.integer()?).ok()?;
        // Rows follow.
        unread.integer()?;
        let object = (unread.text()?.parse().ok()?, unread.text()?.parse().ok()?);
        let (tag, kind) = (unread.text()?, unread.text()?);
        // The section.
        unread.integer()?;
        let definition_at = bytes.len() - unread.bytes.len();
        let definition = unread.text()?;
        let definition_at = definition_at..bytes.len() - unread.bytes.len();
        let drop = unread.text()?;
        // The statement that copies rows.
        unread.text()?;
        let schema = unread.text()?;
        let tablespace_at = bytes.len() - unread.bytes.len();
        let tablespace = unread.text()?;
        texts.push([definition_at, tablespace_at..bytes.len() - unread.bytes.len()]);
        let storage = (tablespace, unread.text()?);
        if version >= (1, 16) {
            // The kind of relation.
            unread.integer()?;
        }
        let owner = unread.text()?;
        // Rows with numbers of their own, which no longer exist.
        unread.text()?;
        let mut needs = Vec::new();
        while let Some(needed) = unread.optional_text()? {
            needs.push(needed.parse().ok()?);
        }
        // Place of the rows.
        unread.take(1 + offset_size)?;
        places.push(begin..bytes.len() - unread.bytes.len());
        entries.push(Entry { id, object, kind, schema, tag, definition, drop, owner, storage, needs });
    }
    let (end, integer_size) = (bytes.len() - unread.bytes.len(), unread.integer_size);
    Some(Parsed { entries, places, texts, count: count_at, end, integer_size })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_testing::postgresql::{Cluster, NEWER_MAJOR, available, newer_available};

    fn dump(cluster: &Cluster) -> Vec<u8> {
        let output = cluster.client("pg_dump").args(["-Fc", "-s", "-d", "shop"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }

    fn made(cluster: &Cluster) -> Vec<u8> {
        cluster.sql("postgres", "CREATE DATABASE shop");
        cluster.sql(
            "shop",
            "CREATE TABLE goods (id int PRIMARY KEY, \"no; te\" text DEFAULT 'x'); COMMENT ON TABLE goods IS E'a\\nb'; \
             CREATE VIEW seen AS SELECT * FROM goods",
        );
        dump(cluster)
    }

    fn check(cluster: &Cluster) {
        let bytes = &made(cluster)[..];
        let entries = read(bytes).unwrap();
        let one = |kind: &str| entries.iter().find(|entry| entry.kind == kind).unwrap();
        let table = one("TABLE");
        assert_eq!(
            (table.schema.as_str(), table.tag.as_str(), table.drop.as_str()),
            ("public", "goods", "DROP TABLE public.goods;\n")
        );
        assert!(table.definition.starts_with("CREATE TABLE public.goods (") && !table.owner.is_empty(), "{table:?}");
        assert_eq!(one("COMMENT").tag, "TABLE goods");
        assert_eq!(one("CONSTRAINT").tag, "goods goods_pkey");
        assert!(one("VIEW").needs.contains(&table.id));
        assert_eq!(table.storage, (String::new(), "heap".to_owned()));
        assert_eq!(table.object.0, 1259);
        assert!(read(&without(bytes, &BTreeSet::new()).unwrap()).unwrap() == entries);
        let longer = rewritten(bytes, |entry| {
            let is_table = entry.kind == "TABLE";
            (is_table.then(|| format!("{}-- more\n", entry.definition)), is_table.then(|| "fast".to_owned()))
        });
        let mut expected = entries.clone();
        let table = expected.iter_mut().find(|entry| entry.kind == "TABLE").unwrap();
        (table.definition, table.storage.0) = (format!("{}-- more\n", table.definition), "fast".to_owned());
        assert!(read(&longer.unwrap()).unwrap() == expected);
        let views: BTreeSet<u32> = entries.iter().filter(|entry| entry.kind == "VIEW").map(|entry| entry.id).collect();
        let fewer = without(bytes, &views).unwrap();
        let kept: Vec<Entry> = entries.iter().filter(|entry| entry.kind != "VIEW").cloned().collect();
        assert!(!views.is_empty() && read(&fewer).unwrap() == kept);
        let list = restored(cluster, &fewer);
        assert!(list.contains(" TABLE public goods ") && !list.contains(" VIEW "), "{list}");
    }

    /// The list that pg_restore prints of an archive.
    fn restored(cluster: &Cluster, archive: &[u8]) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), archive).unwrap();
        let input = std::fs::File::open(file.path()).unwrap();
        let output = cluster.client("pg_restore").arg("--list").stdin(input).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn the_list_of_an_archive_is_read() {
        if available() {
            check(&Cluster::start(&[]));
        }
        if newer_available() {
            check(&Cluster::of_major(NEWER_MAJOR, &[]));
        }
    }

    #[test]
    fn an_archive_that_ends_early_or_is_none_is_refused() {
        if !available() {
            return;
        }
        let whole = made(&Cluster::start(&[]));
        for length in 0..whole.len() {
            assert!(read(&whole[..length]).is_err(), "{length} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x81;
            let _ = read(&damaged);
        }
        assert!(read(b"").is_err() && read(b"PGDMP").is_err());
    }
}
