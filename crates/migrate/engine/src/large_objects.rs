//! Large objects. No log reports their changes, so all their pages are looked at: when the target follows, before the switch,
//! and for the last time in the pause. Each look brings the objects that differ since the one before.

use std::collections::BTreeMap;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Link, number, text};

/// Size in bytes up to which objects are brought together, and of a piece of a larger one.
const PIECE_BYTES: u64 = 1 << 20;
/// Maximum number of objects that are brought together.
const BATCH_MAX: usize = 500;

/// Joins each object with the versions of its pages, for a role that may read the catalog of pages.
const PAGE_VERSIONS: &str = "LEFT JOIN (SELECT loid, count(*) AS pages, (max(pageno::bigint) + 1) * 2048 AS bytes, \
    sum(hashtextextended(concat(pageno, ' ', xmin), 0)) AS sum FROM pg_largeobject GROUP BY loid) p ON p.loid = m.oid";
/// Joins each object with a checksum of its contents, which are opened to be read (mode 0x40000) and read by pieces of 1 MiB.
const CONTENTS: &str = "CROSS JOIN LATERAL (SELECT NULL AS pages, s.bytes, (SELECT sum(hashtextextended(concat(at, ' ', \
    md5(lo_get(m.oid, at, 1048576))), 0)) FROM generate_series(0, s.bytes, 1048576) at) AS sum FROM (SELECT \
    lo_lseek64(lo_open(m.oid, 262144), 0, 2) AS bytes OFFSET 0) s) p";

/// Objects of one side by their numbers, each with a text that differs after each change of owner, rights, comment or page.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LargeObjects {
    known: BTreeMap<u32, ObjectState>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ObjectState {
    mark: String,
    /// Size in bytes that its pages may hold.
    bytes: u64,
}

impl LargeObjects {
    /// Looks at all objects of a side: at the versions of their pages, or, without the right to read these, at all their contents.
    pub(crate) async fn of(link: &mut Link) -> Result<LargeObjects, Error> {
        let may_see_pages = link.value("SELECT has_table_privilege('pg_largeobject', 'SELECT')").await?;
        let pages = if may_see_pages.as_deref() == Some("t") { PAGE_VERSIONS } else { CONTENTS };
        let rows = link
            .query(&format!(
                "SELECT m.oid, concat_ws(' ', m.lomowner, m.lomacl, p.pages, p.sum, d.description), coalesce(p.bytes, 0) \
                 FROM pg_largeobject_metadata m {pages} LEFT JOIN pg_description d ON d.objoid = m.oid AND d.classoid = \
                 'pg_largeobject'::regclass AND d.objsubid = 0"
            ))
            .await?;
        let state = |row| ObjectState { mark: text(row, 1), bytes: number(row, 2) };
        Ok(LargeObjects { known: rows.iter().map(|row| (number(row, 0), state(row))).collect() })
    }

    /// Owners of objects whose contents this session's role may not read, with the number of these.
    pub(crate) async fn unreadable(link: &mut Link) -> Result<Vec<(String, u64)>, Error> {
        let owners = link
            .query(
                "SELECT pg_get_userbyid(m.lomowner), count(*) FROM pg_largeobject_metadata m WHERE NOT has_table_privilege('pg_largeobject', 'SELECT') \
                 AND NOT pg_has_role(m.lomowner, 'USAGE') AND current_setting('lo_compat_privileges') = 'off' AND NOT EXISTS \
                 (SELECT FROM aclexplode(m.lomacl) a WHERE a.privilege_type = 'SELECT' AND (a.grantee = 0 OR \
                 pg_has_role(a.grantee, 'USAGE'))) GROUP BY 1 ORDER BY 1",
            )
            .await?;
        Ok(owners.iter().map(|row| (text(row, 0), number(row, 1))).collect())
    }

    /// Objects that the receiving side has already, each as one whose contents are not known: the first look of [`Self::bring`]
    /// removes those that the other side does not have.
    pub(crate) async fn present(to: &mut Link) -> Result<LargeObjects, Error> {
        let rows = to.query("SELECT oid FROM pg_largeobject_metadata").await?;
        let unknown = || ObjectState { mark: String::new(), bytes: 0 };
        Ok(LargeObjects { known: rows.iter().map(|row| (number(row, 0), unknown())).collect() })
    }

    /// Number of objects, and the sum of their sizes in bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        (self.known.len(), self.known.values().map(|state| state.bytes).sum())
    }

    /// Brings what differs on `from` since the last call to `to`. Returns the number of objects that differed.
    pub(crate) async fn bring(&mut self, from: &mut Link, to: &mut Link) -> Result<usize, Error> {
        let now = LargeObjects::of(from).await?;
        let gone = self.known.keys().filter(|number| !now.known.contains_key(number)).copied();
        let differing: BTreeMap<u32, u64> = now
            .known
            .iter()
            .filter(|(number, state)| self.known.get(number) != Some(state))
            .map(|(number, state)| (*number, state.bytes))
            .collect();
        let remove: Vec<u32> = gone.chain(differing.keys().copied()).collect();
        for numbers in remove.chunks(BATCH_MAX) {
            to.query(&format!(
                "SELECT lo_unlink(oid) FROM pg_largeobject_metadata WHERE oid = ANY ({})",
                array(numbers.iter().copied())
            ))
            .await?;
        }
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for (&number, &size) in &differing {
            if size > PIECE_BYTES {
                bring_large(from, to, number, size).await?;
                continue;
            }
            batch.push(number);
            bytes += size;
            if bytes > PIECE_BYTES || batch.len() == BATCH_MAX {
                bring_batch(from, to, &batch).await?;
                (batch, bytes) = (Vec::new(), 0);
            }
        }
        bring_batch(from, to, &batch).await?;
        let all: Vec<u32> = differing.into_keys().collect();
        for numbers in all.chunks(BATCH_MAX) {
            bring_rights(from, to, numbers).await?;
        }
        *self = now;
        Ok(remove.len())
    }
}

fn array(numbers: impl Iterator<Item = u32>) -> String {
    format!("'{{{}}}'::oid[]", numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(","))
}

/// Makes small objects. One that was removed meanwhile is left out; the next look finds that.
async fn bring_batch(from: &mut Link, to: &mut Link, numbers: &[u32]) -> Result<(), Error> {
    if numbers.is_empty() {
        return Ok(());
    }
    let rows = from
        .query(&format!(
            "SELECT oid, encode(lo_get(oid), 'hex') FROM pg_largeobject_metadata WHERE oid = ANY ({})",
            array(numbers.iter().copied())
        ))
        .await?;
    let make = |row| format!("SELECT lo_from_bytea({}, decode('{}', 'hex')); ", number::<u32>(row, 0), text(row, 1));
    let all: String = rows.iter().map(make).collect();
    if all.is_empty() { Ok(()) } else { Ok(to.query(&all).await.map(drop)?) }
}

/// Makes one large object, in pieces.
async fn bring_large(from: &mut Link, to: &mut Link, object: u32, size: u64) -> Result<(), Error> {
    to.query(&format!("SELECT lo_create({object})")).await?;
    for at in (0..size).step_by(PIECE_BYTES as usize) {
        let piece = format!(
            "SELECT encode(lo_get(oid, {at}, {PIECE_BYTES}), 'hex') FROM pg_largeobject_metadata WHERE oid = {object}"
        );
        let Some(piece) = from.value(&piece).await?.filter(|piece| !piece.is_empty()) else { return Ok(()) };
        to.query(&format!("SELECT lo_put({object}, {at}, decode('{piece}', 'hex'))")).await?;
    }
    Ok(())
}

/// Gives objects their owners, rights and comments.
async fn bring_rights(from: &mut Link, to: &mut Link, numbers: &[u32]) -> Result<(), Error> {
    let rows = from
        .query(&format!(
            "SELECT concat(format('ALTER LARGE OBJECT %s OWNER TO %I; ', m.oid, pg_get_userbyid(m.lomowner)), \
             CASE WHEN m.lomacl IS NOT NULL THEN format('REVOKE ALL ON LARGE OBJECT %s FROM %I; ', m.oid, \
             pg_get_userbyid(m.lomowner)) END, \
             (SELECT string_agg(format('GRANT %s ON LARGE OBJECT %s TO %s%s; ', a.privilege_type, m.oid, \
             CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, \
             CASE WHEN a.is_grantable AND a.grantee <> m.lomowner THEN ' WITH GRANT OPTION' END), '') \
             FROM aclexplode(m.lomacl) a), \
             (SELECT format('COMMENT ON LARGE OBJECT %s IS %L; ', m.oid, d) FROM obj_description(m.oid, 'pg_largeobject') d \
             WHERE d IS NOT NULL)) FROM pg_largeobject_metadata m WHERE m.oid = ANY ({})",
            array(numbers.iter().copied())
        ))
        .await?;
    let all: String = rows.iter().map(|row| text(row, 0)).collect();
    if all.is_empty() { Ok(()) } else { Ok(to.query(&all).await.map(drop)?) }
}
